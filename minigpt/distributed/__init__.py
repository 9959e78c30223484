"""Several ranks: their process group, the strategies of the Trainer, and the exchange of Muon."""
