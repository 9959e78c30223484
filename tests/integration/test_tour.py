"""The notebook docs/minigpt.ipynb in a kernel."""

import os
import string
from base64 import b64decode
from io import BytesIO
from itertools import chain
from types import SimpleNamespace

import nbformat
import pytest
from matplotlib.image import imread
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from small_runs import ROOT, table

NOTEBOOK = ROOT / "docs/minigpt.ipynb"
SHORT = "model.block_size=32 model.n_layer=1 model.n_head=2 schedule.warmup_steps=1 "
SHORT += "callbacks.originality=null trainer=cpu"
PARAMETERS = f"""
import matplotlib
TRAIN = "data.path=all.txt max_steps=20 eval_every=10 model.n_embd=16 {SHORT}".split()
SWEEP = "data.path=all.txt max_steps=2 eval_every=1 model.n_embd=8,16 {SHORT} hydra/launcher=basic"
"""
INTERRUPTED = """
import gc, os, signal, sys
from minigpt import GPT, train
from lightning.pytorch.callbacks import Callback

class Interrupt(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 12:
            print("curves of the first validation:", os.path.exists("stopped/curves.png"))
            signal.raise_signal(signal.SIGINT)  # as the button of Jupyter does

def state():
    gc.collect()
    models = [one for one in gc.get_objects() if type(one) is GPT and not one.wte.weight.is_meta]
    return [signal.getsignal(signal.SIGINT), sys.stderr, dict(os.environ), len(models)]

sys.modules["interrupt"] = sys.modules["__main__"]
before = state()
train([*TRAIN, "+callbacks.interrupt._target_=interrupt.Interrupt", "hydra.run.dir=stopped"])
"""
AFTER = """
assert before == state()
os.remove("stopped/curves.png")
os.mkdir("stopped/curves.png")
resumed = train([*TRAIN, "hydra.run.dir=stopped", "resume=auto"])
print(matplotlib.get_backend(), resumed["status"])
"""
REFUSED = 'train([*TRAIN, "model.n_head=7"])'


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def pictures(cell):
    data = [output.get("data", {}).get("image/png") for output in cell.outputs]
    return [b64decode(picture) for picture in data if picture]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_is_short_and_stores_no_output_but_pictures_that_are_small():
    cells = read().cells
    assert len(cells) <= 40
    outputs = list(chain.from_iterable(cell.get("outputs", []) for cell in cells))
    assert len(outputs) == 3
    assert all({*output.data} == {"image/png"} for output in outputs)
    assert all(cell.get("execution_count") is None for cell in cells)
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    notebook = read()
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = PARAMETERS
    return execute(notebook, folder)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    failing = {"metadata": {"tags": ["raises-exception"]}}
    cells = [new_code_cell(PARAMETERS), new_code_cell(INTERRUPTED, **failing), new_code_cell(AFTER)]
    cells.append(new_code_cell(REFUSED, **failing))
    return execute(new_notebook(cells=cells), tmp_path_factory.mktemp("trainings"))


def execute(notebook, folder):
    # Run a notebook in a folder with a text; return both, and a function that finds a cell
    (folder / "all.txt").write_text(f"{string.printable}\n" * 200, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=environment)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    def find(beginning):
        return next(
            cell
            for cell in code
            if cell.source.strip().startswith(beginning) or beginning in cell.source
        )

    return SimpleNamespace(code=code, find=find, folder=folder)


@pytest.mark.slow
def test_every_cell_runs_without_warnings_and_shows_its_pictures(tour):
    for cell in tour.code:
        assert [output for output in cell.outputs if output.get("name") == "stderr"] == []
        assert "warning" not in printed(cell).lower()
    for beginning in ("run = train(TRAIN)", "sweep.png", "plot_maps("):
        (picture,) = pictures(tour.find(beginning))
        assert imread(BytesIO(picture)).std() > 0.01  # is not blank
    (answer,) = [
        output.data["text/markdown"]
        for output in tour.find("sweep.png").outputs
        if "text/markdown" in output.data
    ]
    assert "n_embd" in answer


@pytest.mark.slow
def test_a_training_shows_the_curves_of_its_end_once_and_a_bar_that_reaches_it(tour):
    cell = tour.find("run = train(TRAIN)")
    (folder,) = (tour.folder / "runs").glob("20*")
    assert pictures(cell) == [(folder / "curves.png").read_bytes()]
    (bar,) = [line for line in printed(cell).splitlines() if "/20 steps" in line]
    assert bar.startswith("20/20 steps")
    assert f"val {float(table(folder / 'metrics.csv')[-1]['val_loss']):.4f}" in bar


@pytest.mark.slow
def test_an_interrupt_saves_a_checkpoint_prints_how_to_resume_and_leaves_the_kernel_alone(
    trainings,
):
    cell = trainings.find(INTERRUPTED)
    after = trainings.find(AFTER)
    (error,) = [output for output in cell.outputs if output.output_type == "error"]
    assert error.traceback == ["interrupted by SIGINT"]
    assert (trainings.folder / "stopped/checkpoints/last.safetensors").exists()
    (line,) = [line for line in printed(cell).splitlines() if line.startswith("resume with: ")]
    assert line.endswith("'resume=auto'])")
    assert "curves of the first validation: True" in printed(cell)
    assert "training    8 steps" in printed(after)
    assert "warning: curves.png was not written: " in printed(after)
    assert "backend_inline completed" in printed(after)


@pytest.mark.slow
def test_an_error_of_the_user_is_one_line_instead_of_a_traceback(trainings):
    (error,) = trainings.find(REFUSED).outputs
    (line,) = error.traceback
    assert "model.n_head=7" in line
