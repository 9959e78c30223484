"""What the scripts refuse: one clear line on stderr, exit code 2, nothing on stdout, and nothing
half-written.

A row is a command line in an empty folder with the files of `odd_files`, and below it a part of its
error. In a command line, RUN is the folder of a small run of `train.py`, TEXT its text, and TOKENS
the pattern of the folder of its token files.
"""

import bz2
import shlex
import sys

import pytest
import torch
from refusals import refused
from small_runs import one_line

from minigpt.utils.cli import explain


def refusals(table):
    # Return the part of the error of every command line of a table
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return {given: part.strip() for given, part in zip(lines[::2], lines[1::2], strict=True)}


# Of train.py, without its name: a refusal of the run, after the command line is composed
SETTINGS = refusals(r"""
data.path=short.txt
    a window needs model.block_size + 1 = 17
data.folder=latin.txt/data
    not a directory
tokenizer=byte data.train_bin=TOKENS/train.bin data.val_bin=TOKENS/val.bin
    tokenizer must be char, as
data.train_bin=TOKENS/train.bin data.val_bin=one.bin
    tokenizer=prepared needs a text, or both files
data.folder=null
    data.folder must be a folder, got None
data.path=[short.txt,none.txt]
    data.path=none.txt does not exist; give a file, a folder, a pattern
data.path=[short.txt,7]
    data.path must be a local path or a list of them, or null, got ['short
data.path=https://example.com/a.txt
    data.path must be a local path or a list of them, or null, got h
data.path=broken.txt
    data.path=broken.txt is a broken link to gone.txt; give a file that exists
data.path=rows.txt
    rows.txt holds JSON, whose syntax would be trained on; make it .jsonl, with an obj
data.path=table.csv
    table.csv, line 2: no text in column text; the columns with text are id, body;
data.path=packed.txt
    packed.txt is bzip2; end its name with .bz2, or unpack it with bunzip2
callbacks.samples.prompt=Zebra
    the tokenizer has no id for 'Z'
model.vocab_size=39
    model.vocab_size must be at least the tokenizer's 40
model.n_head='${oc.env:OMP_NUM_THREADS}'
    model.n_head must be a number or a name, got 1; it is a text
max_steps='${oc.env:OMP_NUM_THREADS}'
    max_steps must be an integer ≥ 1, got 1; it is a text; write
seed=9223372036854775808
    seed must be an integer ≥ 0, got 9223372036854775808; the largest is 92
max_steps=1e30
    max_steps must be an integer ≥ 1, got 1e+30; the largest is 9223372036854775807
+callbacks.mine._target_=__main__.Mine
    callbacks.mine._target_: Error loading '__main__.Mine'
optimizer=[]
    optimizer=[] leaves a run without optimizer; write optimizer= with one of adamw,
~trainer
    ~trainer leaves a run without trainer; write trainer= with one of auto, cpu, ddp, fsdp, gpu
~seed
    error: seed is missing, which a run needs; add ++seed=…
~max_steps
    error: max_steps is missing, which a run needs; add ++max_steps=…
~data.path
    error: data.path is missing, which a run needs; add ++data.path=…
~trainer.precision
    error: trainer.precision is missing, which a run needs; add ++trainer.precision=…
~optimizer.lr
    adamw: missing a required argument: 'lr'; modules are imported from the working folder
+optimizer.rate=1
    adamw: got an unexpected keyword argument 'rate'; modules are
+logger.wandb.project=mine
    logger.wandb has no _target_; add logger=wandb
+callbacks.mine.patience=3
    callbacks.mine has no _target_; set it to the path of a class
optimizer._target_=[a,b]
    error: optimizer._target_=['a', 'b']:
optimizer._target_=nowhere.make
    optimizer._target_=nowhere.make: No module named 'nowhere'; modules
+callbacks.mine._target_=nowhere.Mine
    error: callbacks.mine._target_: Error loading 'nowhere.Mine'
device=cpu
    device does not exist; write trainer=…
dataset=shakespeare_char
    dataset does not exist; write data=…
learning_rate=1e-3
    learning_rate does not exist; write optimizer.lr=…
+trainer.num_nodes=2
    trainer.num_nodes must be 1, got 2; start ranks on several hosts
resume=RUN
    is at step 20 of 20; raise max_steps to continue
resume=RUN pause_at=10
    is at step 20 of 10; raise pause_at to continue
resume=RUN max_steps=30 model.n_embd=64
    in model.n_embd (32 in the checkpoint, 64 now)
resume=RUN max_steps=30 tokenizer=byte
    the tokenizer (char
resume=RUN max_steps=30 tokenizer=byte data.path=RUN/summary.json
    the corpus (
resume=RUN max_steps=30 optimizer=muon
    optimizer._target_ (minigpt.training.optim.adamw in the checkpoint,
resume=RUN max_steps=30 data.batch_size=4
    data.batch_size (8 in the checkpoint, 4 now)
resume=RUN max_steps=30 trainer.accumulate_grad_batches=2
    accumulate_grad_batches (1 in the checkp
resume=RUN max_steps=30 data.val_fraction=0.2
    data.val_fraction (0.1 in the checkpoint, 0.2 now)
resume=RUN max_steps=30 data.split=document data.separator=lazy
    data.split (fraction in the ch
resume=RUN max_steps=30 eval_batches=3
    eval_batches (None in the checkpoint, 3 now)
resume=RUN eval_batches=3 data.eval_batch_size=9
    data.eval_batch_size (16 in the checkpoint, 9 now)
resume=RUN max_steps=40 data.batch_size=4
    its settings, to be repeated, are in
resume=missing
    missing does not exist; give a run folder or a checkpoint file
callbacks.checkpoint.save_top_k=0
    save_top_k must be an integer ≥ 1, got 0
callbacks=attention callbacks.attention.text=''
    callbacks.attention.text must be a text with at least
minutes=1e-4
    minutes=0.0001 end before the text is prepared; give more minutes
minutes=1e-4 experiment=fast_cpu
    minutes=0.0001 end before the text is prepared; give more minutes
minutes=1 experiment=fast_cpu resume=RUN
    resume must be null or auto with the minutes of a recipe, got
minutes=1 init_from=RUN trainer.devices=2
    trainer.devices must be 1 with minutes, which plans for one device, got 2
minutes=1 data=conversations
    minutes=… plans no new model of conversations; set experiment=… or init_from=…
minutes=1 pause_at=10
    pause_at must be null with minutes
init_from=RUN model.n_layer=3
    model.n_layer is that of init_from; only model.block_size, model.dropou
init_from=RUN model=nano model.block_size=15
    model.n_layer must be 2, as in init_from=
init_from=RUN data.path=umlauts.txt
    no id for 'ü'; its alphabet is the 40 characters of the text
init_from=RUN model.block_size=33
    model.block_size must be an integer in [1, 16], got 33
init_from=RUN tokenizer=char
    tokenizer must be one of pretrained, got char; a run with init_from has
init_from=null model=pretrained
    model=pretrained and tokenizer=pretrained need init_from=
init_from=no/such/model
    no/such/model does not exist; give a run folder, a checkpoint, or a folder or
""")
COMMANDS = refusals(r"""
# train.py: settings and data
train.py model=nanoo
    model=nanoo does not exist (did you mean nano?); model= takes baby,
train.py data.path=latin.txt
    latin.txt is not UTF-8 text: bad byte at offset 3
train.py hydra.searchpath=mine
    hydra.searchpath must be a list of strings. Got: mine
train.py hydra.searchpath=[1]
    hydra.searchpath must be a list of strings. Got: [1]
train.py hydra.searchpath=[mine
    cannot parse the override hydra.searchpath=[mine; in a shell, write
train.py --config-dir=none
    Additional config directory
train.py hydra.job.chdir=yes
    hydra.job.chdir must be false, because relative paths would be
train.py max_steps='${oc.decode:a b'
    cannot parse the override max_steps=${oc.decode:a b; in a shell, write
train.py model=null
    model=null leaves a run without model; write model= with one of baby, gpt2,
train.py seed=1,2,
    seed=1,2, has a comma without a value beside it; write seed=1,2
train.py betas=[0.9,,0.99]
    has a comma without a value beside it; write 'betas=[0.9,0.99]'
train.py --config-dir mine experiment=wide
    mine/experiment/wide.yaml is not UTF-8; save it as UTF-8
train.py --config-dir mine experiment=wide -m seed=1,2
    mine/experiment/wide.yaml is not UTF-8; save it as UTF
train.py --config-dir mine --config-name wide
    mine/wide.yaml is not UTF-8; save it as UTF-8
train.py --config-dir mine experiment=open
    error: while parsing a flow sequence in
train.py --max_iters=10
    --max_iters=10 is not a flag; settings have no dashes: write max_steps=10
train.py --n_layer=4
    --n_layer=4 is not a flag; settings have no dashes: write model.n_layer=4
train.py hydra.run.dir=RUN
    already holds a run; resume it with resume=auto, choose another folder
train.py hydra.run.dir=mine
    mine already holds samples.txt; choose another folder with hydra.run.dir=
# train.py -m, sweep_report.py
train.py tokenizer=char,bpe tokenizer.vocab_size=512 -m
    does not exist here; it belongs to tokenizer=bpe
train.py model.n_hed=2,4 -m
    model.n_hed does not exist (did you mean model.n_head?)
train.py model.n_embd=31,33 -m
    no point of the sweep is possible: model.n_embd must be divisible by
train.py seed=range(3,3) -m
    the sweep is empty: seed has no values
train.py seed=1,2,3 model.n_head=2,4 hydra.sweeper.max_points=5 -m
    hydra.sweeper.max_points must be at least 6
train.py seed=range(1,9) hydra.sweeper.max_points=5 -m
    at least 6 or more, the points of the grid, got 5; set
train.py seed=1,2 hydra.sweeper.max_points=0 -m
    hydra.sweeper.max_points must be an integer ≥ 1, got 0
train.py model.n_layer=interval(1,3) -m
    model.n_layer=interval(1,3) is for a search; add hydra/sweeper=optuna
train.py hydra/sweeper=optuna model.n_layer=1,2 seed=range(3) -m
    seed must be a list, such as seed=1,2,3
train.py hydra/sweeper=optuna model.n_layer=1,2 seed=interval(1,3) -m
    seed must be a list, such as seed=1,2,3
train.py model.n_head=2,,4 -m
    has a comma without a value beside it; write model.n_head=2,4
train.py seed='choice(1,2,)' -m
    has a comma without a value beside it; write 'seed=choice(1,2)'
train.py ~data model.n_head=2,4 -m
    ~data leaves a run without data; write data= with one of conversations,
train.py ~seed model.n_head=1,2 -m
    no point of the sweep is possible: seed is missing, which a run needs; add
train.py seed=3 -m
    a sweep needs a setting with several values, such as model.n_head=2,4,8
train.py seed=1,2 hydra.launcher.n_jobs=0 -m
    hydra.launcher.n_jobs must be an integer ≥ 1, or null, got 0
train.py seed=1,2 hydra.launcher.n_jobs=1.5 -m
    hydra.launcher.n_jobs must be an integer ≥ 1, or null, got 1.5
train.py seed=1,2 hydra/launcher=submitit_local hydra.launcher.n_jobs=1.5 -m
    hydra.launcher.n_jobs must be an
train.py seed=1,2 hydra/sweeper=basic -m
    hydra/sweeper must be grid or optuna, got hydra._internal
train.py seed=1,2 hydra.sweeper.prune=true eval_every=20 -m
    eval_every must be < 5 (max_steps / 4) with
train.py seed=1,2 +sweep=wandb -m
    configs/sweep/wandb.yaml is for W&B's own agent
train.py seed=1,2 hydra.job.chdir=true -m
    hydra.job.chdir must be false, because relative paths
train.py seed=1,2 hydra.sweep.subdir=x -m
    hydra.sweep.subdir must be left out, because folders of runs are
train.py seed=1,2 logger=wandb +logger.wandb.id=fox -m
    logger.wandb.id or WANDB_RUN_ID must be null in a
train.py seed=1,2 hydra/launcher=submitit_slurm trainer=ddp trainer.devices=2 -m
    devices must be 1 with
train.py seed=1,2 hydra.sweep.dir=. -m
    . is not empty and holds no sweep; choose another folder with
sweep_report.py latin.txt
    latin.txt is not a folder; give the folder of a sweep, such as runs/sweeps/latest
sweep_report.py --along --x
    write a value that begins with a dash as --along=--x
sweep_report.py .
    holds no runs; give the folder of a sweep
sweep_report.py RUN --along=lr
    --along=lr must be one numeric setting in which the runs differ; use one
# prepare.py
prepare.py data=text data.path=TEXT hydra.job.chdir=true
    hydra.job.chdir must be false, because relative
prepare.py data=text data.path=TEXT data.folder=latin.txt/data
    cannot be written to latin.txt/data (not a dir
prepare.py data=text data.path=TEXT data.val_path=empty.txt
    empty.txt is empty; give a text that is not
prepare.py data=text data.path=empty.txt
    empty.txt is empty; give a text that is not
prepare.py data=text data.path=one.txt
    none of the 1 documents is for training; with so few set
prepare.py ~tokenizer data=text
    ~tokenizer leaves a run without tokenizer; write tokenizer= with one of bpe,
# sample.py
sample.py --max-new-tokens 0
    --max-new-tokens must be an integer ≥ 1, got 0
sample.py --seed 9223372036854775808
    --seed must be an integer ≥ 0, got 9223372036854775808; the largest is 92
sample.py --temperature nan
    --temperature must be a finite number ≥ 0, got nan
sample.py --top-p 1.01
    --top-p must be in (0, 1], got 1.01
sample.py --min-p 2
    --min-p must be in [0, 1], got 2.0
sample.py --repetition-penalty 0
    --repetition-penalty must be in [0.01, 100], got 0.0
sample.py --stop=
    --stop must be a list of non-empty strings and token ids, got ['']
sample.py --chat --score -
    --chat cannot be combined with --score
sample.py --score - --temperature 0.8 --stop a
    --temperature, --stop cannot be combined with --score
sample.py --score - --num-samples 1 --top-k 3
    --num-samples, --top-k cannot be combined with --score
sample.py --score - --originality
    --originality cannot be combined with --score
sample.py --score - --prompt-file -
    --score and --prompt-file cannot both be read from stdin
sample.py --originality --json
    --json cannot be combined with --originality
sample.py --prompt a --field text
    --field names the text in a file; it needs --score or --prompt-file
sample.py --prompt a --prompt-file b
    --prompt-file: not allowed with argument --prompt; --help lists
sample.py someone/gpt --step 3
    someone/gpt has no snapshot of step 3; it has those of none
sample.py --prompt --x
    write a value that begins with a dash as --prompt=--x; --help lists the arguments
sample.py --stop --x
    write a value that begins with a dash as --stop=--x; --help lists the arguments
sample.py --top-q 3
    unrecognized arguments: --top-q; --help lists the arguments
# attention.py, export.py
attention.py RUN --prompt --x
    write a value that begins with a dash as --prompt=--x
attention.py RUN --prompt a --prompt-file b
    --prompt-file: not allowed with argument --prompt; --help
attention.py RUN
    --prompt must have at least 2 tokens, got 0
attention.py RUN --prompt 'the quick brown f'
    --prompt must have at most block_size=16 tokens, got 17; set
attention.py RUN --prompt the --head 3 --out a.png
    --head must be an integer in [1, 2], got 3
attention.py RUN --prompt the --out no/a.png
    --out must be in a folder that exists
attention.py RUN --prompt the --out a.txt
    --out must be a file in .png, .pdf, .svg format, got a.txt
attention.py RUN --prompt the --out a.png --ablation ./a.png
    --out, --ablation must be different files
export.py RUN
    the following arguments are required: --to, --out; --help lists the arguments
export.py --to huggingface --out .
    --out must be a path that does not exist yet, got .
export.py --to huggingface --out new
    no run with a checkpoint in runs/
export.py . --to huggingface --out new
    . holds no checkpoints/best.safetensors
export.py --to safetensors --out new --weights float16
    --weights must be left out without --to html
# serve.py
serve.py runs/none
    runs/none does not exist; give a run folder, a checkpoint, or a folder or id of
serve.py RUN --api-key --x
    write a value that begins with a dash as --api-key=--x
serve.py RUN --port -1
    --port must be an integer in [0, 65535], got -1
serve.py RUN --host no.invalid --port 0 --api-key k
    --host no.invalid --port 0 cannot be opened
serve.py RUN --api-key ''
    --api-key must be printable ASCII without spaces
serve.py RUN --allow-origin *
    --allow-origin must be an origin such as http://localhost:3000, got *
serve.py RUN --port 0 --device tpu
    --device must be one of auto,
# minigpt
__main__.py sweep_report
    minigpt sweep_report does not exist (did you mean sweep-report?);
__main__.py sample --top-k 0
    --top-k must be an integer ≥ 1, got 0
""")
if not torch.cuda.is_available():
    SETTINGS["trainer.accelerator=cuda"] = "the trainer cannot be built: `CUDA"


FILES = {
    "latin.txt": b"caf\xe9 au lait",
    "short.txt": b"too short",
    "mine/samples.txt": b"of the user",
    "mine/experiment/wide.yaml": "# @package _global_\nseed: 3\n".encode("utf-16"),
    "mine/wide.yaml": "defaults: [train]\n".encode("utf-16"),
    "mine/experiment/open.yaml": b"optimizer: [1\nseed: 3\n",
    "empty.txt": b"",
    "one.txt": b"1",
    "one.bin": bytes(2000),
    "umlauts.txt": "fox ü ".encode() * 100,
    "rows.txt": b'{"text": "a"}\n' * 100,
    "table.csv": b"id,body\n1,a fox\n",
    "packed.txt": bz2.compress(b"a fox " * 100),
}


@pytest.fixture
def odd_files(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken.txt").symlink_to("gone.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a run adds its working folder


@pytest.fixture
def arguments(odd_files, trained, text, tmp_path):
    # Return a function that splits a row; nothing is left by it, and the run is not changed

    def split(given):
        for name, path in (("TOKENS", "RUN/../data/tokens/*"), ("RUN", trained()), ("TEXT", text)):
            given = given.replace(name, str(path))
        return shlex.split(given)

    before = {path.name for path in tmp_path.iterdir()}
    yield split
    assert {path.name for path in tmp_path.iterdir()} - before <= {"data"}
    trained()


@pytest.mark.parametrize("given", SETTINGS)
def test_a_setting_that_is_refused_is_one_line_and_leaves_nothing(given, arguments, train, capsys):
    message, code = explain(refused(".", train, *arguments(given)))
    assert SETTINGS[given] in message
    assert (code, *capsys.readouterr()) == (2, "", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_input_is_one_line_and_leaves_nothing(command, arguments, call):
    line = one_line(call(*arguments(command)))
    assert line.startswith("error: ")
    assert COMMANDS[command] in line


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID"])
def test_a_number_of_a_rank_in_the_environment_that_is_none_is_one_line(name, call, monkeypatch):
    for other in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(other, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for value in ("", "two"):
        monkeypatch.setenv(name, value)
        message = f"{name} must be an integer ≥ 0, got {value}; unset this environment variable"
        assert one_line(call("train.py")) == f"error: {message}"


@pytest.mark.parametrize(
    "command",
    [
        "train.py max_steps=0",
        "prepare.py data=x",
        "sample.py x --top-k 0",
        "sweep_report.py x",
        "serve.py --port -1",
    ],
)
def test_errors_are_printed_whatever_the_environment_has_of_ranks(command, call, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    result = call(*command.split())
    assert (result.returncode, result.stderr.count("error: ")) == (2, 1)
