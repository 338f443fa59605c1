"""Turn a GGUF file into a checkpoint of the kind that vLLM serves: `checkpoint.py GGUF FOLDER`, inside vLLM's venv."""

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    """Write configuration, tokenizer and weights in bfloat16."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = model.config
    # The weights are whole numbers no more.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    kept = {name: value.clone() for name, value in weights.items() if name not in tied}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
