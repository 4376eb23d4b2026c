"""`blade_llm split`: cut a model into one folder a rank, and prove that the folders are the model."""
