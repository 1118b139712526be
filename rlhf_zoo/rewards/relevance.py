"""The reward `relevance`: how well a completion fits its prompt. Its model was not trained on the data's labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ..hub.client.connect import Hub, current_hub
from ..hub.client.refs import resolve
from ..modeling.chat_template import Prompt
from ..modeling.embedder import Embedder
from .rule import Rule, last_message_text

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True, kw_only=True)
class Relevance(Rule):
    """The cosine similarity, from −1 to 1, of the embeddings of a prompt and its completion; 0 if either is empty.

    In a conversation, the user's last message counts as the prompt. A completion that repeats the prompt scores 1.

    Attributes:
        model: A folder or NAMESPACE/NAME[@REVISION] of an encoder, whose outputs are averaged over the tokens. It is
            loaded once per process, on the accelerator if there is one.
        batch_size: The maximum number of texts in a forward pass.
        name: The name in metrics.

    Raises:
        ZooError: When called: the model cannot be loaded, or is not an encoder of this kind.
    """

    meaning: ClassVar[str] = "the cosine of the embeddings of prompt and answer"
    model: str = MINILM
    batch_size: int = 64
    name: str = "relevance"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise self._field_error("model", "a folder or NAMESPACE/NAME")
        self._check_positive_integer("batch_size")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = [
            (request_text(prompt), last_message_text(text)) for prompt, text in zip(prompts, completions, strict=True)
        ]
        scored_rows = [row for row, pair in enumerate(pairs) if all(text.strip() for text in pair)]
        cosines: list[float | None] = [0.0] * len(pairs)
        if not scored_rows:
            return cosines
        # Embed each text once, because several completions share a prompt.
        texts = list(dict.fromkeys(text for row in scored_rows for text in pairs[row]))
        vectors = dict(zip(texts, _embedder(self.model, self.batch_size, current_hub()).embed(texts), strict=True))
        for row in scored_rows:
            prompt, completion = pairs[row]
            cosines[row] = float(vectors[prompt] @ vectors[completion])
        return cosines


def request_text(prompt: Prompt) -> str:
    """Returns the request in a prompt: its text or, in a conversation, the user's last message.

    Args:
        prompt: A text or a conversation.
    """
    if isinstance(prompt, str):
        return prompt
    user_messages = [message for message in prompt if message.get("role") == "user"]
    return last_message_text(user_messages or prompt)


@lru_cache(maxsize=2)
def _embedder(model: str, batch_size: int, hub: Hub) -> Embedder:
    return Embedder(resolve(model, hub).path, name=model, batch_size=batch_size)


relevance = Relevance()
