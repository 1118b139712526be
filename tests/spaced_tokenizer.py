"""Chat templates, and a tokenizer like SentencePiece's: a word's token includes the space before the word."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPACED = ("▁how", "▁is", "▁it", "▁good", "▁bad", "▁Sure")
WORDS = (*SPACED, "▁", "how", "is", "it", "good", "Sure", ".", "[INST]", "[/INST]")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nTHINKS{% endif %}"
)
QUESTION = [{"role": "user", "content": "how is it"}]


def metaspace(template: str | None = None) -> PreTrainedTokenizerBase:
    """Makes a tokenizer like Llama 2's: BOS before a text, and ▁ for a space; decoding drops a text's first space."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", "<s>", *WORDS])}
    backend = Tokenizer(models.Unigram([(token, -1.0 * (token not in SPACED)) for token in vocabulary], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<s>"
    )
    tokenizer.chat_template = template
    return tokenizer
