"""The callback that reports what a plan expects, which a plan adds to the run."""

from minigpt.extras.report_callback import ReportCallback
from minigpt.runs.run_dir import Summary


class Expectation(ReportCallback):
    """Report the validation loss that a plan expects beside the one that the run reaches.

    Args:
        loss: in nats per token.
        margin: half of the 90 % interval around it.
    """

    def __init__(self, *, loss: float, margin: float) -> None:
        self.loss = loss
        self.margin = margin

    def results(self) -> Summary:
        return {"expected_val_loss": [self.loss, self.margin]}

    def lines(self, summary: Summary) -> list[tuple[str, str]]:
        reached = summary["best_val_loss"]
        return [("expected", f"{self.loss:.2f} ± {self.margin:.2f}, reached {reached:.3f}")]
