"""`blade_llm quantize`: calibrate and quantize a model, layer by layer."""
