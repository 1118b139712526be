"""Parses HTML and checks that every element is closed."""

from html.parser import HTMLParser

#: Elements without an end tag, and SVG elements without text.
VOID = {"br", "hr", "img", "input", "line", "path", "rect", "circle", "polyline", "use"}


class Page(HTMLParser):
    """A parsed page. Fails if an element is not closed, or not inside its parent.

    elements: (name, attributes, texts inside) of each element, in order.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open_elements: list[int] = []
        self.feed(html)
        self.close()
        assert not self.open_elements, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open_elements.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self.open_elements.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open_elements:
            self.elements[index][2].append(data)

    @property
    def text(self) -> str:
        """All text of the first element."""
        return "".join(self.elements[0][2])

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of this name."""
        return [attributes for name, attributes, _ in self.elements if name == tag]

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """The texts of the elements `tag` with these attributes: `data_side` means data-side, and `class_` class."""
        wanted = {name.replace("_", "-").rstrip("-"): value for name, value in attributes.items()}
        return [
            "".join(texts) for name, attrs, texts in self.elements if name == tag and wanted.items() <= attrs.items()
        ]
