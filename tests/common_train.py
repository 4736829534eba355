"""AC-SGD's published example as data, and a checkpoint small enough to run it by."""

from __future__ import annotations

import json
from pathlib import Path

# README of AC-SGD: what each node runs. Only paths and sizes differ.
EXAMPLE: dict[str, object] = {
    "--cuda-id": 0,
    "--rank": 0,
    "--model-name": "checkpoints/gpt2-tiny",
    "--tokenizer-name": "checkpoints/gpt2-tiny",
    "--load-pretrained-model": "true",
    "--task-name": "corpus.txt",
    "--n-epochs": 2,
    "--warmup-epochs": 1,
    "--num-layers": 1,
    "--num-heads": 4,
    "--embedding-dim": 32,
    "--num-iters": 10_000_000,
    "--lr": "5e-5",
    "--seq-length": 16,
    "--batch-size": 8,
    "--micro-batch-size": 1,
    "--forward-compress-method": "delta",
    "--forward-bits": 4,
    "--backward-compress-method": "fixpoint",
    "--backward-bits": 8,
    "--dist-url": "tcp://127.0.0.1:9000",
    "--world-size": 2,
    "--pipeline-group-size": 2,
    "--pp-mode": "gpipe",
    "--profiling": "no-profiling",
    "--do-evaluation": "true",
    "--num-sequences": 24,
    "--num-eval-sequences": 8,
}


def make_text(path: Path, characters: int = 60_000) -> str:
    """Python's own language reference, cut off."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:characters]
    path.write_text(text, encoding="utf-8")
    return text


def make_checkpoint(folder: Path, text: str, *, layers: int, width: int, positions: int) -> None:
    """A GPT-2 with random weights and a byte-level BPE trained on `text`, as `save_pretrained` leaves them."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    folder.mkdir(parents=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=400, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, n_positions=positions, vocab_size=400, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
