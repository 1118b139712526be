"""HTML as a browser would find it."""

from html.parser import HTMLParser

#: That have no end tag, and those of SVG that hold no text of their own.
VOID = {"br", "hr", "img", "input", "line", "path", "rect", "circle", "polyline", "use"}


class Page(HTMLParser):
    """elements: (name, attributes, texts inside) of each, in order. Every element is closed, inside the one around."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(html)
        self.close()
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.elements[index][2].append(data)

    @property
    def text(self) -> str:
        """All text of the first element."""
        return "".join(self.elements[0][2])

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of this name."""
        return [attributes for name, attributes, _ in self.elements if name == tag]

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """What stands in the elements with these attributes."""
        wanted = {name.replace("_", "-").rstrip("-"): value for name, value in attributes.items()}
        return [
            "".join(inside)
            for name, found, inside in self.elements
            if name == tag and all(found.get(key) == value for key, value in wanted.items())
        ]
