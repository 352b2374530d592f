"""Symbols of matrices: every element is coded in the context of how busy its row and its column are.

The updates of a layer are far from evenly spread: whole rows (units) and columns (inputs) are quiet or busy. Let
|q| be the distance of a symbol from the most frequent one, the *common* symbol (zero, for quantized updates).
Rows and columns are put into classes by the logarithm of their mean |q|, in steps of 1/2 to 4 octaves:

    R_i = round(log2(mean_j |q_ij|) / step)      C_j = round(log2(mean_i |q_ij| / mean |q|) / step)

R_i + C_j is then the logarithm of the |q| to expect at (i, j) if rows and columns were independent, and that sum is
the context. Classes are told in the stream, so that a decoder knows all contexts before the first symbol and works
on whole arrays. Rows and columns without any |q| need no symbols at all. Neighbouring contexts share a frequency
table where a table of their own would not pay; contexts mean the same in all matrices of a stream, so that small
ones live on the tables of the large ones. See FORMAT.md, section 6.

Only the encoder measures and chooses, in integers; the decoder just adds classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.entropy import models, rans
from fedcomp.entropy.bits import pack_bits, unpack_bits
from fedcomp.entropy.symbols import decode_symbols, encode_symbols, histogram
from fedcomp.errors import ConfigError, FrameError

Shapes = Sequence[tuple[int, int]]
Ints = NDArray[np.int64]

_PLAIN, _CONTEXTS = range(2)
_ROWS, _COLUMNS = 1, 2  # flags of a matrix: whether its rows, its columns have classes of their own
_CLASSES = 64  # at most, class 0 for rows and columns without |q| included
_STEPS = (1, 2, 4, 8)  # half octaves
_CONTEXT_BITS = 12  # estimated cost of one more context, most of which come to share a table
_HOPE_BITS = 160  # least estimated gain for which contexts are tried
_DEAD = -(1 << 40)  # class of rows and columns without |q|, until classes are numbered
_MOST_USED = 4096  # symbols: tables of larger alphabets are too long to have several
_MERGE_WORK = 1 << 22  # histogram entries that the search for shared tables may look at
_SPARSE_SHARE = 16  # up to so few others, positions are coded: they may cluster, and few others are quick
_PRECISION = 14  # at most, of a context's table: bounds the memory for a forged stream


def encode_matrices(symbols: NDArray[np.uint8] | NDArray[np.uint16], size: int, shapes: Shapes) -> bytes:
    """Code (count,) symbols in [0, size), the elements of matrices of the given (rows, columns) one after the other.

    At most one byte longer than `encode_symbols`; nothing if that is nothing. Raises ConfigError as it does, and when
    the shapes do not cover the symbols.

    >>> rng = np.random.default_rng(0)
    >>> symbols = (rng.geometric(0.3, (100, 50)) * (np.arange(100) % 5 == 0)[:, None]).astype(np.uint8).ravel()
    >>> len(encode_symbols(symbols, 256)), len(encode_matrices(symbols, 256, [(100, 50)]))
    (866, 414)
    """
    _check(symbols.size, shapes)
    counts = histogram(symbols, size)
    if symbols.size == 0 or size == 1:
        return b""
    data = _encode_contexts(symbols, size, shapes, counts)
    others = symbols.size - int(counts.max())
    bits = models.entropy_cost(counts[counts > 0]) >> models.COST_SHIFT
    if data is not None and others * _SPARSE_SHARE > symbols.size and 8 * len(data) < bits - bits // 64:
        return data  # no order-0 stream can be shorter
    plain = bytes([_PLAIN]) + encode_symbols(symbols, size)
    return plain if data is None or len(plain) <= len(data) else data


def decode_matrices(
    data: bytes | memoryview, count: int, size: int, shapes: Shapes
) -> tuple[NDArray[np.uint8 | np.uint16], int]:
    """Undo `encode_matrices`: ((count,) uint8 when size <= 256, else uint16; bytes consumed). More data may follow.

    Raises FrameError when the data is truncated or damaged in a way that shows; otherwise the result is `count`
    symbols in [0, size).
    """
    _check(count, shapes)
    if count == 0 or size == 1:
        return decode_symbols(data, count, size)
    reader = _Reader(memoryview(data).cast("B"))
    (mode,) = reader.take(1)
    if mode == _PLAIN:
        return reader.symbols(count, size), reader.used
    if mode != _CONTEXTS:
        raise FrameError(f"matrices: expected a known form, got mode byte {mode}; damaged")
    common = int.from_bytes(reader.take(_symbol_bytes(size)), "little")
    row_classes, column_classes = reader.take(2)
    if common >= size or not (0 < row_classes <= _CLASSES and 0 < column_classes <= _CLASSES):
        raise FrameError(
            f"matrices: expected a symbol below {size} and 1 to {_CLASSES} classes of rows and of columns, "
            f"got {common}, {row_classes}, {column_classes}; damaged"
        )
    full = [shape for shape in shapes if shape[0] * shape[1]]
    flags = reader.symbols(len(full), 4)
    told = _told(full, flags)
    rows = reader.symbols(sum(r for r, _ in told), row_classes)
    columns = reader.symbols(sum(c for _, c in told), column_classes)
    contexts = row_classes + column_classes - 1
    starts = np.flatnonzero(unpack_bits(reader.take(-(-contexts // 8)), contexts, 1)).tolist()
    if starts[:1] != [1][: contexts - 1]:
        raise FrameError("matrices: expected the first table to start with the first context; damaged")
    order, ends = _sort(_contexts(full, flags, rows, columns), contexts)
    bounds = [ends[context - 1] for context in [*starts, contexts]]
    out: NDArray[np.uint8 | np.uint16] = np.full(count, common, _dtype(size))
    out[order[ends[0] :]] = reader.groups([b - a for a, b in pairwise(bounds)], size)
    return out, reader.used


class _Reader:
    """The bytes of one stream and how many have been used."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.used = data, 0

    def take(self, count: int) -> bytes:
        taken = bytes(self.data[self.used : self.used + count])
        if len(taken) < count:
            raise FrameError(f"matrices: expected {count} bytes, got {len(taken)}; truncated")
        self.used += count
        return taken

    def symbols(self, count: int, size: int) -> NDArray[np.uint8 | np.uint16]:
        symbols, used = decode_symbols(self.data[self.used :], count, size)
        self.used += used
        return symbols

    def groups(self, counts: list[int], size: int) -> NDArray[np.uint8 | np.uint16]:
        """Undo `_write_groups` for groups of these counts."""
        out: NDArray[np.uint8 | np.uint16] = np.empty(sum(counts), _dtype(size))
        ends = np.cumsum(counts).tolist()
        tables: list[models.Table] = []
        runs: list[slice] = []
        for count, end in zip(counts, ends, strict=True):
            (precision,) = self.take(1)
            if precision > _PRECISION:
                raise FrameError(f"matrices: expected a table of at most {_PRECISION} bits, got {precision}; damaged")
            if precision:
                table, used = models.read_table(self.data[self.used :], size, precision, count)
                self.used += used
                tables.append(table)
                runs.append(slice(end - count, end))
            else:
                out[end - count : end] = self.symbols(count, size)
        if tables:
            common = max(table.precision for table in tables)
            tables, lengths = [table.widened(common) for table in tables], [run.stop - run.start for run in runs]
            symbols, used = rans.decode_runs(self.data[self.used :], tables, lengths, _dtype(size))
            self.used += used
            for run, part in zip(runs, np.split(symbols, np.cumsum(lengths[:-1])), strict=True):
                out[run] = part
        return out


def _check(count: int, shapes: Shapes) -> None:
    if sum(rows * columns for rows, columns in shapes) != count:
        raise ConfigError(f"matrices: expected shapes with {count} elements together, got {str(list(shapes))[:80]}")


def _symbol_bytes(size: int) -> int:
    return ((size - 1).bit_length() + 7) // 8


def _dtype(size: int) -> type[Any]:
    return np.uint8 if size <= 256 else np.uint16


def _told(shapes: Shapes, flags: NDArray[Any]) -> list[tuple[int, int]]:
    """How many classes of rows and of columns a stream has for each matrix: one when they all share it."""
    return [
        (rows if flag & _ROWS else 1, columns if flag & _COLUMNS else 1)
        for (rows, columns), flag in zip(shapes, flags.tolist(), strict=True)
    ]


def _contexts(shapes: Shapes, flags: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.uint8]:
    """The context of every element: 0 if its row or column has class 0, else the sum of both classes, less one."""
    contexts = np.empty(sum(r * c for r, c in shapes), np.uint8)
    start = row = column = 0
    for shape, (r, c) in zip(shapes, _told(shapes, flags), strict=True):
        out = contexts[start : start + shape[0] * shape[1]].reshape(shape)
        mine = rows[row : row + r, None].astype(np.uint8), columns[None, column : column + c].astype(np.uint8)
        np.add(mine[0], mine[1] - np.uint8(1), out=out)
        out *= (mine[0] != 0) & (mine[1] != 0)
        start, row, column = start + out.size, row + r, column + c
    return contexts


def _sort(contexts: NDArray[np.uint8], how_many: int) -> tuple[Ints, list[int]]:
    """(places of the elements, context by context; where each context ends in them)."""
    order = np.argsort(contexts, kind="stable")  # a radix sort for bytes
    return order, np.cumsum(np.bincount(contexts, minlength=how_many)).tolist()


# --- the encoder's choices -------------------------------------------------------------------------------------------


def _encode_contexts(symbols: NDArray[Any], size: int, shapes: Shapes, counts: Ints) -> bytes | None:
    """The form with contexts, or None where it looks hopeless."""
    used = np.flatnonzero(counts)
    if not 1 < used.size <= _MOST_USED:
        return None
    full = [shape for shape in shapes if shape[0] * shape[1]]
    common = int(counts.argmax())
    choices = _choose_all(_sums(symbols, common, size, full))
    if not choices:
        return None
    flags = np.array([choice.flags for choice in choices], np.uint8)
    rows = _numbered(np.concatenate([choice.rows.classes for choice in choices]))
    columns = _numbered(np.concatenate([choice.columns.classes for choice in choices]))
    row_classes, column_classes = int(rows.max()) + 1, int(columns.max()) + 1
    contexts = row_classes + column_classes - 1
    order, ends = _sort(_contexts(full, flags, rows, columns), contexts)
    ordered = symbols[order]
    histograms = [np.bincount(ordered[a:b], minlength=size)[used] for a, b in pairwise(ends)]
    first = 1 + _share_tables(np.array(histograms, np.int64).reshape(-1, used.size))
    starts = np.zeros(contexts, np.uint8)
    starts[first] = 1
    header = bytes([_CONTEXTS]) + common.to_bytes(_symbol_bytes(size), "little") + bytes([row_classes, column_classes])
    header += encode_symbols(flags, 4) + encode_symbols(rows, row_classes) + encode_symbols(columns, column_classes)
    edges = [ends[context - 1] for context in [*first.tolist(), contexts]]
    return header + pack_bits(starts, 1) + _write_groups([ordered[a:b] for a, b in pairwise(edges)], size)


def _write_groups(groups: list[NDArray[Any]], size: int) -> bytes:
    """Each group as a byte 0 and a stream of its own, or as the precision of its table and that table.

    The symbols of all groups of the latter kind follow in one rANS stream: one set of lanes serves them all.
    """
    out, cost = b"", 0
    tables: list[models.Table] = []
    dense: list[NDArray[Any]] = []
    for group in groups:
        counts = histogram(group, size)
        if (group.size - int(counts.max())) * _SPARSE_SHARE <= group.size:
            out += b"\0" + encode_symbols(group, size)
            continue
        tables.append(models.fit(counts, _PRECISION))
        cost += tables[-1].cost(counts[tables[-1].symbols])
        out += bytes([tables[-1].precision]) + models.write_table(tables[-1], size)
        dense.append(group)
    if not tables:
        return out
    common = max(table.precision for table in tables)
    tables, runs = [table.widened(common) for table in tables], [group.size for group in dense]
    return out + rans.encode_runs(np.concatenate(dense), tables, runs, cost >> models.COST_SHIFT)


def _sums(symbols: NDArray[Any], common: int, size: int, shapes: Shapes) -> list[tuple[Ints, Ints]]:
    """Sums of |q| over each row and each column of each matrix."""
    distance = np.abs(np.arange(size) - common).astype(np.uint16)
    out, start = [], 0
    for rows, columns in shapes:
        q = distance[symbols[start : start + rows * columns]].reshape(rows, columns)
        out.append((q.sum(axis=1, dtype=np.int64), q.sum(axis=0, dtype=np.int64)))
        start += rows * columns
    return out


@dataclass(frozen=True)
class _Lines:
    """Rows or columns in classes: the class of each (one for all of them if not told), _DEAD without |q|."""

    classes: Ints
    sums: Ints  # of |q|, of each live class
    lines: Ints  # how many, in each live class
    cost: int  # of telling the classes, in 2**-16 bit

    @classmethod
    def told(cls, sums: Ints, log_scale: Ints, step: int) -> "_Lines":
        """A class for each line: the logarithm of its sum of |q| less `log_scale`, in steps."""
        classes = _classes(sums, log_scale, step)
        counts = np.unique(classes, return_counts=True)[1]
        live = classes != _DEAD
        which = np.unique(classes[live], return_inverse=True)[1]
        pooled = np.bincount(which, weights=sums[live]).astype(np.int64)
        cost = models.entropy_cost(counts) + (counts.size * 5 << models.COST_SHIFT)
        return cls(classes, pooled, np.bincount(which), cost)

    @classmethod
    def alike(cls, sums: Ints, log_scale: Ints, step: int) -> "_Lines":
        """One class for all lines."""
        total = sums.sum(keepdims=True)
        return cls(_classes(total, log_scale, step), total, np.array([sums.size]), 0)


@dataclass(frozen=True)
class _Choice:
    """How one matrix is put into classes, and its estimated cost in 2**-16 bit."""

    flags: int
    rows: _Lines
    columns: _Lines
    cost: int


def _choose_all(sums: list[tuple[Ints, Ints]]) -> list[_Choice]:
    """The choice for each matrix at the step of least estimated cost; nothing if order 0 seems no worse."""
    total = sum(int(rows.sum()) for rows, _ in sums)
    elements = sum(rows.size * columns.size for rows, columns in sums)
    least = int(_geometric_cost(np.array([total]), np.array([elements]))) - (_HOPE_BITS << models.COST_SHIFT)
    best: list[_Choice] = []
    for step in _STEPS:
        choices = [_choose(rows, columns, step << (models.COST_SHIFT - 1)) for rows, columns in sums]
        contexts = {int(c) for x in choices for c in np.add.outer(_live(x.rows), _live(x.columns)).ravel()}
        cost = sum(choice.cost for choice in choices) + (len(contexts) * _CONTEXT_BITS << models.COST_SHIFT)
        if cost < least:
            best, least = choices, cost
    return best


def _choose(rows: Ints, columns: Ints, step: int) -> _Choice:
    """The cheapest of: one class for the whole matrix, classes of its rows, of its columns, of both."""
    total = rows.sum(keepdims=True)
    tall, wide = _log(np.array([rows.size])), _log(np.array([columns.size]))
    row_options = {0: _Lines.alike(rows, tall + wide, step)}
    column_options = {0: _Lines.alike(columns, _log(total), step)}
    if rows.size > 1:
        row_options[_ROWS] = _Lines.told(rows, wide, step)
        if columns.size > 1:
            column_options[_COLUMNS] = _Lines.told(columns, _log(total) - wide, step)
    choices = []
    for (a, r), (b, c) in product(row_options.items(), column_options.items()):
        sums = r.sums[:, None] * (c.sums / np.maximum(total, 1))  # as if rows and columns were independent
        cost = int(_geometric_cost(sums.astype(np.int64), np.multiply.outer(r.lines, c.lines)))
        choices.append(_Choice(a | b, r, c, r.cost + c.cost + cost))
    return min(choices, key=lambda choice: choice.cost)


def _classes(sums: Ints, log_scale: Ints, step: int) -> Ints:
    return np.where(sums > 0, (_log(sums) - log_scale + step // 2) // step, _DEAD)


def _live(lines: _Lines) -> Ints:
    return np.unique(lines.classes[lines.classes != _DEAD])


def _log(values: Ints) -> Ints:
    return models.log2_fixed(np.maximum(values, 1))


def _geometric_cost(sums: Ints, elements: Ints) -> np.int64:
    """Cost of the |q| of groups of elements with geometric distributions of these sums (signs cost the same always)."""
    both = sums + elements
    cost: np.int64 = (both * _log(both) - sums * _log(sums) - elements * _log(elements)).sum()
    return cost


def _numbered(classes: Ints) -> NDArray[np.uint8]:
    """Classes as symbols: 0 is dead, the lowest live one is 1; what lies too far below the highest joins the lowest."""
    live = classes != _DEAD
    classes = np.maximum(classes, classes.max() - _CLASSES + 2)
    lowest = classes[live].min(initial=classes.max())
    return np.where(live, classes - lowest + 1, 0).astype(np.uint8)


def _share_tables(histograms: Ints) -> Ints:
    """The contexts that start a new table, for histograms (contexts, used symbols): the division of least cost."""
    width = 1
    while (len(histograms) // width) ** 2 * histograms.shape[1] > 2 * _MERGE_WORK:
        width *= 2
    edges = np.append(np.arange(0, len(histograms), width), len(histograms))
    below = np.concatenate([np.zeros((1, histograms.shape[1]), np.int64), histograms.cumsum(axis=0)])[edges]
    costs, froms = [0], [0]
    for end in range(1, len(edges)):
        cost = np.array(costs) + _table_cost(below[end] - below[:end])
        froms.append(int(cost.argmin()))
        costs.append(int(cost.min()))
    cuts, end = [], len(edges) - 1
    while end:
        end = froms[end]
        cuts.append(int(edges[end]))
    return np.array(cuts[::-1], np.int64)


def _table_cost(histograms: Ints) -> Ints:
    """Cost of coding each histogram (groups, used symbols) with a table of its own, that and the coder's included."""
    counts = histograms.sum(axis=1)
    used = np.count_nonzero(histograms, axis=1)
    bits = counts * _log(counts) - (histograms * _log(histograms)).sum(axis=1)
    table = used * (_log(counts) - _log(used) + (2 << models.COST_SHIFT)) // 2
    fixed = np.where(used > 1, 40, 16 * used) << models.COST_SHIFT
    cost: Ints = np.maximum(bits, 0) + bits // 200 + np.where(used > 1, table, 0) + fixed
    return cost
