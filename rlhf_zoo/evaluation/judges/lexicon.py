"""Creates the judge `lexicon`, which weighs positive against negative opinion words from the recipe's word lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import ZooError
from ...plugins import CORPORA, load_object
from ...runs.settings.parse import RecipeConfig
from .scalar import LexiconJudge


def lexicon_judge(shared: RecipeConfig) -> LexiconJudge | None:
    """Creates the judge of `evaluation.lexicon`.

    Args:
        shared: The recipe's keys. Its corpus has a function `lexicon` that reads the words: (path) -> {word: 1 or -1}.

    Returns:
        The judge; None if the recipe names no lexicon.

    Raises:
        ZooError: The words cannot be read, or the recipe has no corpus with a function `lexicon`.
    """
    path = shared.evaluation.lexicon
    if path is None:
        return None
    corpus = None if shared.corpus is None else load_object(shared.corpus, group=CORPORA)
    read_lexicon: Callable[[str], Mapping[str, int]] | None = getattr(corpus, "lexicon", None)
    if read_lexicon is None:
        owner = "a recipe without a corpus" if corpus is None else f"the corpus {shared.corpus}"
        raise ZooError(f"evaluation.lexicon names {path}, but {owner} reads no lexicon: remove the key.")
    signs = read_lexicon(path)
    positive, negative = ([word for word, sign in signs.items() if sign == polarity] for polarity in (1, -1))
    return LexiconJudge(positive, negative)
