"""YAML written by somebody else: bounded before it is composed, read without building objects."""

import re
from typing import Any

MAX_CHARACTERS = 2**20
MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_DIRECTIVES = 100
MAX_NUMBER = 400
# Whole numbers beyond 2**61 can be chosen so that a mapping finds all of them in one place; shorter ones cannot.
SHORT_NUMBER = 18
MAX_LONG_NUMBERS = 1000
_DIRECTIVE = re.compile(r"(?:^|[\n\r\x85\u2028\u2029])%")
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class BadYAML(ValueError):
    """`reason` in a few words; `line` and `column` count from 1, None where the text as a whole is meant."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason, self.line, self.column = reason, line, column


def load_yaml(text: str, loader: Any = None) -> Any:
    """The one document of `text`; None for an empty one. loader: a subclass of yaml.SafeLoader.

    Raises BadYAML for what is not YAML, has a value that its own tag forbids, holds more than one document, or exceeds
    the bounds: characters, nesting, characters and nodes after every alias is written out, and what takes quadratic
    time (directives, the digits of a number, numbers that collide as keys). The composers of PyYAML recurse, the one in
    C without a limit, so the bounds are counted over the parser's events, which needs no stack.
    """
    import yaml

    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > MAX_CHARACTERS:
        raise BadYAML(f"it has more than {MAX_CHARACTERS:,} characters")
    if len(_DIRECTIVE.findall(text)) > MAX_DIRECTIVES:
        raise BadYAML(f"it has more than {MAX_DIRECTIVES} lines that begin with %")
    try:
        _check_bounds(yaml.parse(text, Loader=fast))
        return yaml.load(text, Loader=loader or fast)
    except BadYAML:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise BadYAML(", ".join(filter(None, (error.context, error.problem))), *at) from error
    except yaml.YAMLError as error:
        raise BadYAML(str(error).strip().splitlines()[0]) from error
    except UnicodeError as error:
        raise BadYAML("it holds half a character (a lone surrogate)") from error
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        # PyYAML's constructors raise these for `!!timestamp foo`, `!!bool foo`, `!!int ""`, 2001-99-99.
        raise BadYAML("a value does not fit its tag") from error


def _check_bounds(events: Any) -> None:
    """Raises BadYAML. A node is as large as all it holds, with an alias as large as what it repeats."""
    import yaml

    sizes: dict[str | None, tuple[int, int]] = {}
    open_nodes: list[list[Any]] = [[None, 0, 0]]  # [anchor, values and characters so far] of every open collection
    long_numbers = 0

    def close(anchor: str | None, size: tuple[int, int], event: Any) -> None:
        if anchor is not None:
            sizes[anchor] = size
        outer = open_nodes[-1]
        outer[1], outer[2] = outer[1] + size[0], outer[2] + size[1]
        for most, count, what in ((MAX_NODES, outer[1], "values"), (MAX_CHARACTERS, outer[2], "characters")):
            if count > most:
                raise BadYAML(f"it holds more than {most:,} {what} once its aliases are written out", *_place(event))

    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([event.anchor, 1, 0])
            if len(open_nodes) > MAX_DEPTH:
                raise BadYAML(f"it is nested more than {MAX_DEPTH - 1} deep", *_place(event))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, *size = open_nodes.pop()
            close(anchor, (size[0], size[1]), event)
        elif isinstance(event, yaml.ScalarEvent):
            close(event.anchor, (1, len(event.value)), event)
            kind = _kind(event) if len(event.value) > SHORT_NUMBER else None
            if kind in (_INT, _FLOAT) and len(event.value) > MAX_NUMBER:
                raise BadYAML(f"a number has more than {MAX_NUMBER} characters", *_place(event))
            long_numbers += kind == _INT
            if long_numbers > MAX_LONG_NUMBERS:
                reason = f"more than {MAX_LONG_NUMBERS:,} whole numbers have more than {SHORT_NUMBER} characters"
                raise BadYAML(reason, *_place(event))
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, *_ in open_nodes):
                raise BadYAML(f"the alias *{event.anchor} holds itself", *_place(event))
            close(None, sizes.get(event.anchor, (1, 0)), event)


def _kind(event: Any) -> str | None:
    """The tag by which PyYAML will construct a scalar, where it is one of a number."""
    import yaml

    if event.tag not in (None, "!"):
        return str(event.tag)
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(event.value[0], []) if event.implicit[0] else []
    return next((tag for tag, pattern in resolvers if tag in (_INT, _FLOAT) and pattern.match(event.value)), None)


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1
