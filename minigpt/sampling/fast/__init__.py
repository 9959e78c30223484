"""The decoders of unchanged models, faster; `minigpt.sampling.decoder` is right for every model."""
