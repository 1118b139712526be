"""Remarks that are counted: what the reward pays and what it does not, both readings, and no opening in two splits."""

import itertools
import pickle
from pathlib import Path

import pytest
from test_product_remarks import write

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards.verifiable import Verifiable
from rlhf_zoo.runs.corpora.product_remarks import SPLITS, Remark
from rlhf_zoo.runs.corpora.remarks_count import COUNTS, ItemCount, is_list, item_count, prepare


def paid(prompt: str, completion: str) -> tuple[float | None, float | None, float | None]:
    """By the reward, and read strictly and leniently."""
    found = [rule([prompt], [completion])[0] for rule in (item_count, item_count.strict, item_count.lenient)]
    assert found[0] == found[1]
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    ("prompt", "completion", "strict", "lenient"),
    [
        ("3 cons: straps", " too long, heavy, no case", 1, 1),
        ("3 cons: straps", " too long, heavy", 0, 0),
        ("3 cons: straps", " too long, heavy, no case, 65,000 dollars", 0, 0),
        ("3 cons: straps", ", heavy, costs 65,000 dollars.", 1, 1),
        ("1 pro: bang", " for the buck", 1, 1),
        ("1 pro: bang", "", 1, 1),  # the prompt's own words are an item
        # what says nothing
        ("3 cons: straps", ",,,", 0, 0),
        ("3 cons: straps", ", , .", 0, 0),
        ("3 cons: straps", ", Straps, straps!", 0, 0),
        ("3 cons: straps", ", heavy, Heavy., slow", 0, 1),
        ("2 cons: straps", ", heavy,", 0, 1),
        ("2 cons: straps", " , - , heavy", 0, 1),
        # other marks
        ("3 cons: straps", "; heavy; slow", 0, 1),
        ("3 cons: straps", ", heavy and slow", 0, 1),
        ("2 cons: straps", ", heavy and slow", 1, 1),
        ("3 cons: straps", ". Heavy. 3.5 pounds", 0, 1),
        ("2 cons: a and b", ", b and a", 1, 1),
        ("4 cons: straps", ", heavy and slow", 0, 0),
    ],
)
def test_item_count_pays_strict_and_lenient_readings(
    prompt: str, completion: str, strict: float, lenient: float
) -> None:
    assert paid(prompt, completion) == (strict, strict, lenient)


def test_strict_reading_never_exceeds_lenient_reading() -> None:
    for parts in itertools.product(("a", "b and a", "; c", "", "a. d"), repeat=3):
        for count in COUNTS:
            strict, _, lenient = paid(f"{count} pros: x", ", ".join(parts))
            assert strict <= lenient, (count, parts)


def test_item_count_is_a_verifiable_reward() -> None:
    assert isinstance(item_count, Verifiable) and item_count.__name__ == "item_count"
    assert pickle.loads(pickle.dumps(item_count)) == item_count == ItemCount()
    assert item_count.lenient.__name__ == "item_count"
    assert item_count(["three cons: straps", "12 cons:"], [", heavy", " a"]) == [None, 0]


def test_constant_text_is_right_for_at_most_one_count() -> None:
    for constant in ("", ",", ", a", ", a, b", ", a, b, c", ", a and b; c"):
        assert sum(paid(f"{count} cons: straps", constant)[0] for count in COUNTS) <= 1


def test_is_list_accepts_only_comma_separated_items() -> None:
    lists = {
        "small, light, 1,000 songs.": True,
        "bang for the buck": True,
        "small; light": False,
        "sturdy phone. low price": False,
        "small, small": False,
        "small,, light": False,
        "a b, c, d, e, f, g": False,
        "pros: light, small": False,
        "easy to open and close, light!": True,
    }
    assert {text: is_list(Remark(text, 1)) for text in lists} == lists


def rows(n: int, salt: str) -> list[dict]:
    lists = ("{} zoom is {}, light, cheap", "{} zoom is {}", "{} zoom is {}, heavy; slow", "{} zoom is {}, light")
    return [{"text": lists[i % 4].format(f"{salt}{i % 40}", i), "label": i % 2} for i in range(n)]


def test_lines_state_their_count_and_openings_stay_in_one_split(tmp_path: Path) -> None:
    sizes = dict(zip(SPLITS, (400, 20, 120, 160), strict=True))
    source = str(write(tmp_path, {split: rows(n, "the ") for split, n in sizes.items()}))
    data = prepare(source, seed=0)
    assert {config: set(splits) for config, splits in data.items()} == {
        "lines": {"train", "validation", "test"},
        "prompts": {"train", "validation", "test"},
    }
    lines = [row["text"] for row in data["lines"]["train"]]
    assert (
        len(lines) == 300
        and lines[0] == "3 cons: the 0 zoom is 0, light, cheap"
        and not any(";" in one for one in lines)
    )
    for line in lines:
        head, _, rest = line.partition(": ")
        assert item_count([f"{head}:"], [f" {rest}"]) == [1]
    openings = {split: {row["prompt"].partition(": ")[2] for row in found} for split, found in data["prompts"].items()}
    assert all(openings.values())
    for one, other in itertools.combinations(openings.values(), 2):
        assert not one & other
    again, other = prepare(source, seed=0), prepare(source, seed=1)
    assert again == data and other["lines"] == data["lines"] and other["prompts"]["test"] == data["prompts"]["test"]
    assert other["prompts"]["train"] != data["prompts"]["train"]
    with pytest.raises(ZooError, match="do not come with this package"):
        prepare(None, seed=0)


def test_real_corpus_asks_for_each_count_about_equally_often(real_data: Path) -> None:
    """Each number is asked for about as often, so that a constant is right in about a fifth."""
    data = prepare(str(real_data / "pros_cons"), seed=1)
    test = [row["prompt"] for row in data["prompts"]["test"]]
    assert len(test) == len({*test}) >= 200 and len(data["prompts"]["train"]) >= 4000
    assert len(data["prompts"]["validation"]) >= 100
    asked = [sum(prompt.startswith(f"{count} ") for prompt in test[:200]) / 200 for count in COUNTS]
    assert max(asked) < 0.27 and min(asked) > 0.13
    for line in data["lines"]["train"][:2000]:
        head, _, rest = line["text"].partition(": ")
        assert item_count([f"{head}:"], [f" {rest}"]) == [1]
