"""Hypothesis strategies: vectors with nasty values, and layouts."""

import numpy as np
from hypothesis import strategies as st

from fedcomp import Layout, Tensor
from fedcomp.layout import Vector

MAX = float(np.finfo(np.float32).max)
NASTY = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e38, MAX, -MAX, 1e-8, 127.0)


@st.composite
def layouts(draw: st.DrawFn, most: int = 300) -> Layout:
    """One to four tensors of zero to three dimensions, empty ones included."""
    shapes = draw(st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=4))
    tensors = [Tensor(f"t{i}", tuple(shape)) for i, shape in enumerate(shapes)]
    kept = [t for t in tensors if t.size <= most]
    return Layout(tuple(kept) or (Tensor("t", (5,)),))


@st.composite
def vectors(draw: st.DrawFn, size: int) -> Vector:
    """Float32 values of one of several distributions, some replaced by nasty ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "heavy", "sparse", "constant", "nasty"]))
    scale = draw(st.sampled_from([1.0, 1e-6, 1e6, 1e-30, 1e30]))
    x: Vector = rng.standard_normal(size, np.float32)
    if kind == "heavy":
        x = x**3
    elif kind == "sparse":
        x *= rng.random(size) < 0.1
    elif kind == "constant":
        x[:] = draw(st.sampled_from(NASTY))
        return x
    x = (x * np.float32(scale)).astype(np.float32)
    if kind == "nasty" and size:
        places = rng.integers(0, size, max(1, size // 4))
        x[places] = rng.choice(np.array(NASTY, np.float32), places.size)
    return x


@st.composite
def layouts_with_vectors(draw: st.DrawFn) -> tuple[Layout, Vector]:
    """A layout and a vector for it."""
    layout = draw(layouts())
    return layout, draw(vectors(layout.size))
