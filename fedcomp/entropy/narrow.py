"""Steps of few lanes in plain Python: there numpy's calls, a dozen a step, take longer than what they compute.

Same states, same words, same bytes as the steps in `rans`.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FrameError

if TYPE_CHECKING:
    from fedcomp.entropy.rans import _Words

WIDEST = 8
"""Lanes up to which this is the quicker way."""

_FLOOR, _LOW, _WORD, _STATE = 1 << 16, 0xFFFF, 16, 0xFFFF_FFFF


def encode_piece(states: NDArray[np.uint32], shares: NDArray[np.uint32], precision: int, words: "_Words") -> None:
    """See rans._encode_piece; within a step the last lane comes first, as the first one's word is the topmost."""
    lanes: list[int] = states.tolist()
    buffer, top = words.buffer.data, words.top
    width, whole, room = states.size, 1 << precision, 32 - precision
    for place, share in zip(range(shares.size - 1, -1, -1), reversed(shares.tolist()), strict=True):
        lane = place % width
        state, frequency = lanes[lane], share >> _WORD
        if state >= (frequency << room) & _STATE:
            top -= 1
            buffer[top] = state & _LOW
            state >>= _WORD
        lanes[lane] = (state + state // frequency * (whole - frequency) + (share & _LOW)) & _STATE
    words.top = top
    states[:] = lanes


def decode_piece(
    states: NDArray[np.uint32],
    slots: NDArray[np.uint32],
    lookup: NDArray[np.uint32],
    bases: NDArray[np.uint32] | None,
    precision: int,
    words: "_Words",
) -> None:
    """See rans._decode_piece."""
    lanes: list[int] = states.tolist()
    shares, buffer, top, end = lookup.data, words.buffer.data, words.top, words.buffer.size
    width, mask = states.size, (1 << precision) - 1
    offsets = [0] * slots.size if bases is None else bases.tolist()
    found = []
    for place, offset in enumerate(offsets):
        lane = place % width
        state = lanes[lane]
        slot = (state & mask) + offset
        found.append(slot)
        share = shares[slot]
        state = (state >> precision) * (share >> _WORD) + (share & _LOW)
        if state < _FLOOR:
            if top == end:
                raise FrameError("rANS stream: expected more words, got the end of the data; truncated or damaged")
            state = state << _WORD | buffer[top]
            top += 1
        lanes[lane] = state
    words.top = top
    words.end = max(words.end, top)
    slots[:] = found
    states[:] = lanes
