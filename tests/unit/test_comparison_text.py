"""Tokens as text: whole characters, leading spaces, and visible control characters."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
)

from rlhf_zoo.app.engine import visible_text
from rlhf_zoo.modeling.alignment import IncrementalDetokenizer
from rlhf_zoo.modeling.special_tokens import train_tokenizer


def pieces_of(tokenizer, ids: list[int]) -> tuple[list[str], list[str]]:
    """(pieces, the text after each token)."""
    pieces, texts = IncrementalDetokenizer(tokenizer), []
    for token in ids:
        pieces.add(token)
        texts.append(pieces.text)
    pieces.finish()
    return pieces.by_token, texts


BYTES = train_tokenizer(["a b"], vocab_size=258, max_length=512)


def test_multi_token_character_appears_at_last_token() -> None:
    text = "a€🙂é"
    ids = BYTES(text)["input_ids"]
    assert len(ids) == 1 + 3 + 4 + 2
    pieces, texts = pieces_of(BYTES, ids)
    assert pieces == ["a", "", "", "€", "", "", "", "🙂", "", "é"]
    assert texts[-1] == text and not any("\ufffd" in part for part in texts)
    pieces, texts = pieces_of(BYTES, BYTES("a€")["input_ids"][:-1])
    assert pieces == ["a", "", "\ufffd"] and texts[-1] == "a", "a cut character is shown at the end"


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=30))
def test_pieces_join_to_decoded_text_for_any_bytes(data: bytes) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = [BYTES.convert_tokens_to_ids(alphabet[byte]) for byte in data]
    assert None not in ids
    pieces, texts = pieces_of(BYTES, ids)
    whole = BYTES.decode(ids)
    assert "".join(pieces) == whole and len(pieces) == len(ids)
    assert all(whole.startswith(text) for text in texts)


def test_pieces_include_leading_space() -> None:
    """A sentencepiece token alone decodes without its leading space."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "▁the": 1, "▁camera": 2, "s": 3, "<unk>": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    assert tokenizer.decode([2]) == "camera"
    pieces, texts = pieces_of(tokenizer, [1, 2, 3, 1, 0])
    assert pieces[:4] == ["the", " camera", "s", " the"] and pieces[4].endswith("<eos>")
    assert texts[3] == texts[4] == "the cameras the"


def test_visible_text_shows_control_characters() -> None:
    assert visible_text("a\x00b\x1b[0m\x7f\x9b\r") == "a␀b␛[0m␡⟨U+009B⟩␍"
    assert visible_text("\u202etxt.exe\u2066\u200b\ufeff") == "⟨U+202E⟩txt.exe⟨U+2066⟩⟨U+200B⟩⟨U+FEFF⟩"
    plain = "two\nlines\tand <b>markup</b>, नमस्ते, 👩\u200d💻, क्\u200dष"
    assert visible_text(plain) == plain
    assert visible_text("\ud800") == "⟨U+D800⟩"
