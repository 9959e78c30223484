"""Memory, traffic, time and cost of a training run on many devices, forecast without them."""
