"""The functions and classes of `minigpt.extras` that the core uses, imported on first use."""

from pkgutil import resolve_name
from typing import Any

_MODULES = {
    "ConversationCorpus": "conversations.corpus",
    "ConversationReader": "conversations.reader",
    "HuggingFaceTokenizer": "huggingface.tokenizer_json",
    "compute_sentence": "research.multiplier",
    "TurnEncoder": "conversations.encoding",
    "WeightedBatches": "conversations.corpus",
    "add_chat": "conversations.encoding",
    "chat_of": "conversations.encoding",
    "append_to_ledger": "research.conclusion",
    "compute_shares": "research.multiplier",
    "encode_chat": "conversations.encoding",
    "find_huggingface": "huggingface.pretrained",
    "find_resumed_corpus": "corpora.run_corpus",
    "hub_source": "corpora.hub_data",
    "join_chunks": "huggingface.whole_documents",
    "last_line": "research.conclusion",
    "load_token_bins": "corpora.token_bins",
    "plan_overrides": "planner.planned_run",
    "planned_overrides": "planner.planned_sizes",
    "plays_source": "corpora.plays",
    "prune": "search.pruning",
    "read_compressed": "corpora.compressed",
    "read_csv": "corpora.tables",
    "read_json_rows": "conversations.reader",
    "read_parquet": "corpora.tables",
    "rung_steps": "search.pruning",
    "seed_batches": "research.more_seeds",
    "spool": "corpora.standard_input",
    "steps_note": "planner.swept_plans",
    "swept_overrides": "planner.swept_plans",
    "train_with_code": "research.code_trees",
    "unmarked": "conversations.encoding",
    "with_possible_sizes": "planner.planned_sizes",
    "count_answers": "conversations.corpus",
    "write_stand_in": "corpora.plays",
    "written_version": "research.code_trees",
}


def from_extras(name: str) -> Any:
    """Return a function or a class of the extras."""
    return resolve_name(f"minigpt.extras.{_MODULES[name]}:{name}")
