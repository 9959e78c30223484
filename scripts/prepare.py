"""Make token files without training: python scripts/prepare.py data=text data.path=my.txt tokenizer=bpe

It takes the groups data= and tokenizer= of scripts/train.py, which does the same when it has to. A
preparation that was interrupted carries on where it stopped.
"""

import os

import hydra
from omegaconf import DictConfig

from minigpt.runs.config_checks import check_run
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.terminal import sanitize_line

os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on, and `one_line` says them


@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare")
def main(cfg: DictConfig) -> None:
    """What Hydra calls with the composed configuration."""
    cli_entrypoint(prepare)(cfg)


def prepare(cfg: DictConfig) -> None:
    """Prepare, and say what the files hold."""
    check_run(cfg)
    from minigpt.data.prepare import describe_corpus, load_corpus

    for name, value in describe_corpus(load_corpus(cfg.data, cfg.tokenizer)).items():
        print(f"{name:17}{sanitize_line(value)}")


if __name__ == "__main__":
    cli_entrypoint(main)()
