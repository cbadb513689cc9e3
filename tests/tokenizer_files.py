"""A byte-level tokenizer.json with special tokens, trained on the standard library, and texts on which tokenizers differ."""

import json
import random
from pathlib import Path

from meshrunner.recipes.data.stdlib import library, library_files

BEGIN, END = "<|begin|>", "<|end|>"


def write_tokenizer(folder: Path, vocab_size: int = 700) -> Path:
    """Write tokenizer.json, whose post-processor adds the begin token, and tokenizer_config.json. Return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(40), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": BEGIN,
        "eos_token": {"__type": "AddedToken", "content": END},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def library_texts(count: int) -> list[str]:
    """Return the beginnings of `count` files of the standard library."""
    names = [name for name, _ in library_files()]
    chosen = names[:: max(1, len(names) // count)][:count]
    return [(library() / name).read_text(encoding="utf-8", errors="replace")[:20_000] for name in chosen]


def odd_texts() -> list[str]:
    """Return texts with odd spaces, emoji, control characters and the text of special tokens."""
    rng = random.Random(0)
    parts = [
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u3000",
        "▁",
        "a",
        "def",
        "ß",
        "日本",
        "🎉",
        "👩‍👩‍👧",
        "e\u0301",
        "\x00",
        "7",
    ]
    parts += ["👩\u200d👩\u200d👧", BEGIN, END, "<s>", "</s>", "<unk>", "<0x0A>", "Word"]
    return ["", " ", *("".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(60))]
