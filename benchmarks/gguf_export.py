"""Write a model folder in Hugging Face layout as GGUF files, so that llama.cpp can run the same weights.

    python benchmarks/gguf_export.py FOLDER [--model smollm2-135m] [--type bf16 --type q4_0]

For llama and qwen2 models with plain rope. Vectors are written as F32. With ``q4_0`` all matrices are Q4_0 but the one
that makes the logits (the embedding where it is tied), which is Q8_0: what llama.cpp's own Q4_0 has where rows are no
multiple of 256. Where they are, its own is Q6_K, which the gguf package can't write. The files have no tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.quants import quant_shape_to_byte_shape, quantize

from sakiyomi.gguf_conversion import _expected, _row_order
from sakiyomi.models import open_weights, read_config, resolve
from sakiyomi.targets.decoder import DecoderConfig

TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}


def export(folder: Path, path: Path, name: str) -> None:
    """Write the model in ``folder`` to ``path``, its matrices in the type of this name.

    One tensor is in memory at a time, in float32. Raises ValueError for a model that isn't exported.
    """
    raw = read_config(folder)
    config = DecoderConfig.from_huggingface(raw)
    if config.architecture not in ("llama", "qwen2") or config.rope["rope_type"] != "default" or any(config.windows):
        raise ValueError(f"{folder} isn't exported: only llama and qwen2 models with plain rope and no windows are")
    weights = open_weights(folder)
    kind, file_type = TYPES[name]
    logits = "token_embd.weight" if config.tied else "output.weight"

    def stored(tensor: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        if len(shape) == 1:
            return GGMLQuantizationType.F32
        return GGMLQuantizationType.Q8_0 if name == "q4_0" and tensor == logits else kind

    def values(source: str, heads: int) -> npt.NDArray[np.float32]:
        found = weights[source].to(torch.float32).numpy()
        order = _row_order(len(found), heads)  # of each row of ours: where GGUF has it
        return found if order is None else found[np.argsort(order)]

    writer = GGUFWriter(path, config.architecture)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("none")  # token ids are all that the benchmarks exchange
    keys = {"head_dim": config.head_dim, "num_key_value_heads": config.kv_heads, "tie_word_embeddings": config.tied}
    tensors = list(_expected({**raw, **keys}))
    for tensor, _, shape, _ in tensors:
        size = quant_shape_to_byte_shape(shape, stored(tensor, shape))
        writer.add_tensor_info(tensor, size, np.dtype(np.uint8), int(np.prod(size)), stored(tensor, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, source, shape, heads in tensors:
        writer.write_tensor_data(quantize(values(source, heads), stored(tensor, shape)))
    writer.close()


def main() -> None:
    """Write the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--type", action="append", choices=list(TYPES), help="default: each")
    args = parser.parse_args()
    source = resolve(args.model)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.type or TYPES:
        path = args.folder / f"{Path(args.model).name}-{name}.gguf"
        export(source, path, name)
        print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
