"""The callback that draws some text after a training, to see how much of it is copied."""

import time
from pathlib import Path
from typing import Any

from minigpt.data.token_files import Corpus
from minigpt.data.tokenizer import Tokenizer
from minigpt.extras.report_callback import ReportCallback
from minigpt.model.gpt import GPT
from minigpt.runs.callbacks.samples import draw_samples, only_a_warning
from minigpt.runs.run_dir import SAMPLES, Summary
from minigpt.utils.checks import NON_NEGATIVE_INT, POSITIVE_INT, or_null
from minigpt.utils.errors import RunError, require
from minigpt.utils.scripts import usage

DRAWN_TOKENS = 400  # of each sample
MAX_DRAWN = 50  # samples at a time: a cache of keys and values and a row of logits for each
MAX_ANSWERS = 4  # to one question
MAX_INDEXED_BYTES = 20e6  # of the training text: an index of more takes longer than the rest
DECODED_TOKENS = 1 << 20  # whose characters are counted, to know how long a sample is
DRAWING = 0.8  # of the time; the comparison takes the rest


class Originality(ReportCallback):
    """Compare drawn text, the final sample and validation text with the training text.

    A table of it is appended to `samples.txt`. Without it, `originality` of the summary is None.

    Args:
        characters: to draw, at most; fewer if the time is short. None: the text is not compared.
        seed: of the first sample.
    """

    def __init__(self, *, characters: int | None, seed: int) -> None:
        require("callbacks.originality.characters", characters, *or_null(POSITIVE_INT))
        require("callbacks.originality.seed", seed, *NON_NEGATIVE_INT)
        self.characters = characters
        if characters is not None:
            self.draws = f"{characters:,} characters, to see how much is copied"
        self.seed = seed
        # By the name of the text, the shares of new n-grams and the longest match
        self.compared: dict[str, dict[str, Any]] | None = None

    def on_sampled(
        self, model: GPT, corpus: Corpus, sample: str, folder: Path, seconds: float
    ) -> None:
        if self.characters is None:
            return
        end = time.perf_counter() + DRAWING * seconds
        with only_a_warning("the originality of the text is not known"):
            from minigpt.extras.interpret import originality  # imports an index of suffixes

            # Of the token files of another tool, only the validation split was counted
            train, val = corpus.train, corpus.val
            if (train.bytes or train.tokens * val.bytes / val.targets) > MAX_INDEXED_BYTES:
                raise RunError(
                    f"the training text has more than 20 MB; compare with {usage('sample')} "
                    "--originality"
                )
            index = originality.build_index(corpus)
            drawn = self._draw(model, corpus, end)
            # Compare, with as much of the validation text
            validation = originality.validation_texts(corpus, sum(map(len, drawn)))
            texts = {"final_sample": [sample], "generated_text": drawn}
            texts["validation_text"] = validation
            compared = {
                name: originality.originality(index, *parts) for name, parts in texts.items()
            }
            with open(folder / SAMPLES, "a", encoding="utf-8") as file:
                file.write(f"── originality ──\n{originality.format_table(compared)}\n\n")
            self.compared = {name: originality.figures(row) for name, row in compared.items()}

    def _draw(self, model: GPT, corpus: Corpus, end: float) -> list[str]:
        # Samples until they have enough characters; those that end with a document are short
        tokenizer: Tokenizer = corpus.tokenizer
        ids = corpus.scored_tokens("val")[:DECODED_TOKENS].tolist()
        # Answers to many questions, but texts that start alike
        most = MAX_DRAWN if corpus.is_text else MAX_ANSWERS
        per_sample = max(1, DRAWN_TOKENS * len(tokenizer.decode(ids)) // len(ids))
        drawn: list[str] = []
        missing = self.characters or 0
        while missing > 0 and (left := end - time.perf_counter()) > 0:
            samples = draw_samples(
                model,
                tokenizer,
                corpus.sample_prompt("", len(drawn))[1],
                seconds=left,
                max_new_tokens=DRAWN_TOKENS,
                temperature=0.8,
                seed=self.seed + len(drawn),
                num_samples=min(most, -(-missing // per_sample)),
            )
            for each in samples:
                drawn.append(each.text[:missing])
                missing -= len(drawn[-1])
        return drawn

    def results(self) -> Summary:
        return {"originality": self.compared}

    def lines(self, summary: Summary) -> list[tuple[str, str]]:
        if self.compared is None:
            return []
        copied = {name: each["longest"] for name, each in self.compared.items()}
        text = (
            f"{copied['generated_text']:,} characters, "
            f"{copied['validation_text']:,} in the validation text"
        )
        return [("longest copy", text)]
