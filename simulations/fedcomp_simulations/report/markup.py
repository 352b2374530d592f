"""HTML that is escaped by construction: texts are escaped, only what `tag` made is not."""

from html import escape

_VOID = ("br", "img", "meta")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | None) -> Markup:
    """Make an element. Children that are plain texts are escaped, and so are all values of attributes.

    Names of attributes may end in "_", as `class_`, and have "_" for "-"; None leaves one out.

    >>> tag("p", "a < b", tag("br"), class_="note")
    '<p class="note">a &lt; b<br></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join(f' {key}="{escape(value)}"' for key, value in given.items())
    if name in _VOID:
        return Markup(f"<{name}{start}>")
    return Markup(f"<{name}{start}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Put pieces one after the other; those that are plain texts are escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def fill(template: str, *values: str) -> Markup:
    """Put values into the "{}" of a text; both are escaped.

    >>> fill("{} wins", tag("b", "<x>"))
    '<b>&lt;x&gt;</b> wins'
    """
    return Markup(escape(template).format(*(join(value) for value in values)))
