"""`blade_llm_bench`: TTFT–QPS and TBT–QPS curves of any OpenAI-compatible server."""
