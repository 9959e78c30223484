"""Data sets of the hub, with `datasets` and a server that has the interface of the hub."""

import io

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import texts_of, values, write_files
from hub import Hub
from refusals import refused

from minigpt.checkpoints.format import contents, write
from minigpt.data.prepare import load_corpus
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.model.config import GPTConfig
from minigpt.utils.errors import RunError, UserError

TRAIN = [f"Once upon a time there was a fox number {i}. Ünï 漢字 😀\n\nThe end." for i in range(40)]
HUB = ("openwebtext", "tinystories")
UNREACHED = r"^data\.dataset=me/plays could not be reached \([^\n]*set data\.path=…$"
VAL = ["A story to validate on.", "", "And another story: é漢."]


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """A folder with the layout of a hub data set, without a hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))
    (tmp_path / "stories/data").mkdir(parents=True)
    for split, texts in (("train", TRAIN), ("validation", VAL)):
        write_stories(tmp_path / "stories", split, texts)
    return tmp_path / "stories"


def write_stories(folder, split, texts):
    table = pa.table({"id": range(len(texts)), "text": texts, "title": ["a title"] * len(texts)})
    pq.write_table(table, folder / f"data/{split}-00000-of-00001.parquet")


def test_a_folder_with_the_layout_of_a_hub_is_read_with_its_validation_split_if_it_has_one(
    find, stories, tmp_path
):
    source, val = find(*HUB, dataset=str(stories))
    assert (texts_of(source), texts_of(val), source.name) == (TRAIN, VAL, "tinystories")
    for other in ("revision", "field"):
        assert find(*HUB, dataset=str(stories), **{other: "other"})[0].sha256 != source.sha256
    write_stories(stories, "train", [*TRAIN, "one more"])
    changed, val_again = find(*HUB, dataset=str(stories))
    assert (changed.sha256 != source.sha256, val_again.sha256) == (True, val.sha256)
    assert find("openwebtext", dataset=str(stories))[1] is None
    message = "cannot be read: BuilderConfig 'other' not found"
    refused(message, find, *HUB, dataset=str(stories), subset="other")


def test_the_checksum_of_a_folder_is_that_of_the_rows_that_are_read(
    find, stories, tmp_path, monkeypatch
):
    """Not of its path, nor of other files in it."""
    source, val = find(*HUB, dataset=str(stories))
    (stories / "README.md").write_text("# Stories")
    (stories / ".cache").write_text("hidden")
    monkeypatch.chdir(tmp_path)
    for path in (str(stories), "stories", "./stories/"):
        same, same_val = find(*HUB, dataset=path)
        assert (same.sha256, texts_of(same)) == (source.sha256, TRAIN)
        assert (same_val.sha256, texts_of(same_val)) == (val.sha256, VAL)
    write_stories(stories, "validation", ["other rows"])
    same, changed = find(*HUB, dataset=path)
    assert same.sha256 == source.sha256
    assert changed.sha256 != val.sha256


def test_a_text_file_of_a_folder_with_the_layout_of_a_hub_is_one_document(find, stories):
    folder = stories.parent / "texts"
    write_files(folder, {"train_1.txt": "One day.\r\n\r\nTwo dogs.\n", "train_2.txt": "The end."})
    (source, _) = find("openwebtext", dataset=str(folder))
    assert texts_of(source) == ["One day.\n\nTwo dogs.\n", "The end."]


def test_null_of_a_hub_is_left_out_and_counted_and_every_line_end_is_a_line_break(
    find, stories, capsys
):
    write_stories(stories, "train", ["a\rb\r\nc", None, "", None])
    source, _ = find("openwebtext", dataset=str(stories))
    for _ in range(2):
        assert texts_of(source) == ["a\nb\nc", ""]
    warning = f"2 rows of data.dataset={stories} have null instead of a text and are left out"
    assert capsys.readouterr().err == f"warning: {warning}\n"


def parquet(texts):
    content = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), content)
    return content.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with the interface of the hub, which the clients take for it, and empty caches."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub/hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub/datasets")
    hub = Hub()
    with hub.serve():
        point_at(hub.url, monkeypatch)
        yield hub


def point_at(url, monkeypatch):
    """Do what HF_ENDPOINT does before these modules are imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)


@pytest.fixture
def offline(monkeypatch):
    def offline_():
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    return offline_


@pytest.mark.parametrize("card", [{"README.md": b"# Plays"}, {}], ids=["card", "none"])
def test_a_data_set_of_the_hub_is_its_commit(find, hub, card, capsys):
    files = {"validation.parquet": parquet(["val"]), **card}
    first = hub.commit(files | {"train.parquet": parquet(["one", "two"])})
    source, val = find(*HUB, dataset="me/plays")
    assert (texts_of(source), texts_of(val)) == (["one", "two"], ["val"])
    assert f"is read at commit {first}; data.revision={first} fixes it\n" in capsys.readouterr().err
    hub.commit(files | {"train.parquet": parquet(["changed"])})
    changed, _ = find(*HUB, dataset="me/plays")
    assert texts_of(changed) == ["changed"]
    assert texts_of(source) == ["one", "two"]  # the commit that its checksum is of
    assert changed.sha256 != source.sha256
    assert find(*HUB, dataset="me/plays", revision=first)[0].sha256 == source.sha256
    hub.commit(hub.commits[first], branch="v1")
    assert find(*HUB, dataset="me/plays", revision="v1")[0].sha256 == source.sha256


def test_without_a_network_a_data_set_is_the_commit_last_seen_and_read_from_the_cache_if_there(
    find, hub, offline, monkeypatch
):
    files = {"train.parquet": parquet(["one"]), "README.md": b"# Plays"}
    first = hub.commit(files)
    source, _ = find("openwebtext", dataset="me/plays")
    with monkeypatch.context() as patched:
        patched.setenv("HF_DATASETS_OFFLINE", "1")
        patched.delattr(huggingface_hub, "errors")  # no module has imported it in a new process
        assert find("openwebtext", dataset="me/plays")[0].sha256 == source.sha256
    datasets.load_dataset("me/plays")
    second = hub.commit(files | {"train.parquet": parquet(["two"])})
    changed, _ = find("openwebtext", dataset="me/plays")
    offline()
    assert find("openwebtext", dataset="me/plays")[0].sha256 == changed.sha256
    with pytest.raises(RunError, match=UNREACHED):
        texts_of(changed)  # not the other commit, which is in the cache
    cached, _ = find("openwebtext", dataset="me/plays", revision=first)
    assert (texts_of(cached), cached.sha256, first != second) == (["one"], source.sha256, True)


def test_an_unknown_data_set_or_revision_and_a_hub_that_is_down_are_one_line(
    find, hub, offline, monkeypatch
):
    hub.commit({"train.parquet": parquet(["one"]), "README.md": b"# Plays"})
    plays = {"dataset": "me/plays"}
    for changes in ({"dataset": "me/nothing"}, plays | {"revision": "v9"}, {"dataset": "a b"}):
        with pytest.raises(UserError, match=r"^data\.dataset=.* cannot be read: ") as error:
            find("openwebtext", **changes)
        assert error.value.exit_code == 2
    point_at("http://127.0.0.1:9", monkeypatch)
    for _ in range(2):
        with pytest.raises(RunError, match=UNREACHED):
            find("openwebtext", **plays)
        offline()


def test_the_corpus_of_a_checkpoint_is_found(stories, tmp_path):
    own = {"folder": str(tmp_path / "data"), "dataset": str(stories), "val_fraction": 0.2}
    data = values() | values("openwebtext") | own
    corpus = load_corpus(data, {"name": "char"})
    model = GPTConfig(vocab_size=corpus.tokenizer.vocab_size)
    own = {"config": {"data": data}, "corpus_sha256": corpus.sha256}
    content = contents(model, corpus.tokenizer, **own)
    write(content | {"state_dict": {}}, tmp_path / "last.safetensors")
    load_corpus(data | {"val_fraction": 0.5}, {"name": "char"})  # another split of the same text
    assert find_corpus(tmp_path / "last.safetensors").val == corpus.val


def test_a_run_does_not_resume_on_its_token_files_if_another_data_set_is_given(
    train, stories, tmp_path
):
    given = ("data=openwebtext", "data.path=null", "data.val_split=validation", "tokenizer=byte")
    train(*given, f"data.dataset={stories}", "max_steps=1")
    refused(
        "is not searched, because other settings select the text",
        train,
        *given,
        f"data.dataset={tmp_path}/another",
        "max_steps=2",
        "resume=auto",
    )


def test_a_data_set_that_is_unreachable_or_without_a_column_or_split_is_one_line(find, stories):
    for changes, problem in (
        (
            {"field": "id"},
            rf"^data\.dataset={stories}: column id holds int, not text; .*text are text, title;",
        ),
        (
            {"field": "body"},
            rf"^data\.dataset={stories}: no text in column body; .*text are text, title;",
        ),
        ({"train_split": "exam"}, "exam"),
        ({"dataset": "nobody/nothing"}, r"^data\.dataset=nobody/nothing [^\n]*$"),
    ):
        with pytest.raises(UserError, match=problem):
            texts_of(find(*HUB, **{"dataset": str(stories)} | changes)[0])
