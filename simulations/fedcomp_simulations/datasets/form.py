"""What the samples of a data set look like, which is all that a network needs to know of them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """The form of one sample.

    Attributes:
        shape: of one sample: `(features,)`, `(channels, steps)`, `(channels, height, width)`, or `(positions,)`.
        classes: labels are 0..classes-1.
        symbols: samples are rows of whole numbers 0..symbols-1; 0: they are float32 features.
        everywhere: there is a label for every position, not one for the sample.
    """

    shape: tuple[int, ...]
    classes: int
    symbols: int = 0
    everywhere: bool = False

    @property
    def features(self) -> int:
        """Numbers in one sample."""
        return math.prod(self.shape)

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width; a row is a grey square, two axes are a grey image. None: it is no image."""
        if len(self.shape) == 1:
            side = math.isqrt(self.features)
            return (1, side, side) if side * side == self.features else None
        if len(self.shape) == 2:
            return (1, *self.shape)
        return self.shape if len(self.shape) == 3 else None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        what = f"rows of {shape} of {self.symbols} symbols" if self.symbols else f"features of shape {shape}"
        return f"{what} with {'a label at every position' if self.everywhere else 'one label each'}"
