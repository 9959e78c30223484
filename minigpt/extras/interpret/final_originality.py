"""How much of its text a model copies, at the end of a training."""

import time
from pathlib import Path
from typing import Any

from minigpt.data.token_files import Corpus
from minigpt.extras.interpret import originality
from minigpt.model import GPT
from minigpt.runs.callbacks.samples import draw, only_a_warning
from minigpt.runs.run_dir import ORIGINALITY_HEADER, SAMPLES
from minigpt.utils.errors import RunError
from minigpt.utils.scripts import usage

DRAWN_TOKENS = 400  # of each sample that is compared with the training text
MAX_INDEXED = 20e6  # bytes of a training text: an index of more takes longer than the rest


def final_originality(
    model: GPT, corpus: Corpus, sample: str, folder: Path, *, characters: int, seed: int, seconds: float
) -> dict[str, Any] | None:
    """Draw some text; compare it, the final sample and the validation text with the training text, in `samples.txt`.

    Args:
        characters: at most; fewer if drawing them takes longer than `seconds`.

    Returns:
        By the name of the text, the shares of new n-grams and the longest match; None, with a warning, if that fails.
    """
    with only_a_warning("the originality of the text is not known"):
        end = time.perf_counter() + seconds
        if corpus.train.bytes > MAX_INDEXED:
            raise RunError(f"the training text has more than 20 MB; compare with {usage('sample')} --originality")
        index, per_token = originality.build_index(corpus), corpus.train.bytes / corpus.train.tokens
        count = -(-characters // max(1, int(DRAWN_TOKENS * per_token)))
        settings: Any = {"max_new_tokens": DRAWN_TOKENS, "temperature": 0.8, "seed": seed, "num_samples": count}
        draws = draw(model, corpus.tokenizer.start, seconds=end - time.perf_counter(), **settings)
        text = "".join(map(corpus.tokenizer.decode, draws))[:characters]
        texts = {
            "final_sample": sample,
            "generated_text": text,
            "validation_text": originality.validation_text(corpus, len(text)),
        }
        compared = {name: originality.originality(index, text) for name, text in texts.items()}
        with open(folder / SAMPLES, "a", encoding="utf-8") as file:
            file.write(f"{ORIGINALITY_HEADER}\n{originality.format_table(compared)}\n\n")
        figures = {}
        for name, row in compared.items():  # names of JSON and of W&B are texts
            new = {str(n): share for n, share in row["new"].items()}
            figures[name] = {"new": new, "longest": row["longest"]}
        return figures
    return None
