"""The engine: the loop, the model runner, the sampler, and the process that holds them."""
