"""A tiny GGUF file: a model with 8-bit matrices, and a byte-level tokenizer."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

FILE = "tiny.Q8_0.gguf"


def write_gguf(folder: Path, *, kind: str = "llama", context: int = 64) -> Path:
    """Writes a model with one layer. kind: Its architecture."""
    rng, width, inner = np.random.default_rng(0), 32, 64
    tokens = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>", "<|end|>"]
    writer = gguf.GGUFWriter(folder / FILE, kind)
    writer.add_license("mit")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(1)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    sizes = {"token_embd": (len(tokens), width), "output": (len(tokens), width)}
    sizes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
    sizes |= {"blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner)}
    for name, size in sizes.items():
        quantized = gguf.quants.quantize(rng.normal(size=size).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / FILE
