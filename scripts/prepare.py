"""Write token files without training: python scripts/prepare.py data=text data.path=my.txt

It takes the config groups data= and tokenizer= of scripts/train.py, which also writes token files
if they are missing.
"""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run_config import check_hydra, check_run
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.scripts import search_path, usage
from minigpt.utils.terminal import replace_dead_output, sanitize_line

os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors; `cli_entrypoint` prints them
OmegaConf.register_new_resolver("usage", usage, replace=True)  # for --help: configs/hydra/help/


def main(cfg: DictConfig) -> None:
    """Run with the composed configuration."""
    cli_entrypoint(prepare)(cfg)


def prepare(cfg: DictConfig) -> None:
    """Write the token files and print their figures."""
    check_hydra(HydraConfig.get())
    check_run(cfg)
    from minigpt.data.prepare import load_corpus

    tokenizer = cfg.tokenizer
    if cfg.init_from is not None:
        from minigpt.checkpoints.init_from import find_pretrained

        tokenizer = find_pretrained(cfg.init_from).tokenizer.to_dict()
    corpus = load_corpus(cfg.data, tokenizer)
    rows = {"corpus": corpus.name}
    tokens = corpus.train.tokens + corpus.val.tokens
    for name, split in (("training", corpus.train), ("validation", corpus.val)):
        share = f"{split.tokens:,} tokens ({100 * split.tokens / max(1, tokens):.4g} %)"
        rows[name] = f"{split.documents:,} documents, {split.bytes:,} bytes, {share}"
        if not corpus.is_text:
            learned = f"{split.targets:,} tokens, {split.bytes:,} bytes of answers"
            rows[name] = f"{split.documents:,} conversations, {learned}, {share}"
    if corpus.provenance:  # empty for nanoGPT's files
        n_bytes = corpus.train.bytes + corpus.val.bytes
        targets = corpus.train.targets + corpus.val.targets  # all tokens of a text
        rows["bytes per token"] = f"{n_bytes / max(1, targets):.3f}"
        rows["vocabulary"] = f"{corpus.tokenizer.vocab_size:,} ids"
        rows["in both splits"] = f"{corpus.provenance['duplicates']:,} documents"
        rows["files"] = f"train.bin and val.bin of {corpus.dtype}"
    rows["folder"] = str(corpus.train.files[0].parent)
    for name, value in rows.items():
        print(f"{name:17}{sanitize_line(value)}")


@cli_entrypoint
def start() -> None:
    """Run Hydra with the command line as it takes it."""
    replace_dead_output(ends_script=False)
    sys.argv[1:] = complete_overrides(sys.argv[1:], groups=["tokenizer"])
    path = search_path(["--config-name", "prepare", *sys.argv[1:]])
    hydra.main(version_base="1.3", config_path=path, config_name="prepare")(main)()


if __name__ == "__main__":
    start()
