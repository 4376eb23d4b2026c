"""Which engines load a result, as of late 2026: what decides is the format, the scheme and the group size.

From the loaders of transformers 5 (`quantizers/quantizer_*.py`), vLLM (`compressed_tensors_wNa16.py`, `auto_gptq.py`),
SGLang (`docs/advanced_features/quantization.md`) and LMDeploy (`turbomind/converter.py`).
"""

from bladellm_runtime.quantization.scheme import Scheme

YES = "yes"
TURBOMIND_GROUPS = {"compressed-tensors": (32, 128), "gptq": (128,), "awq": (128,)}


def engines(format_name: str, scheme: Scheme, scrambled: bool) -> list[tuple[str, str]]:
    """(engine, `yes` or what it lacks), ours first."""
    return [
        ("BladeLLM Open", YES),
        ("transformers", _transformers(format_name)),
        ("vLLM", _vllm(format_name, scheme)),
        ("SGLang", YES if format_name != "gptq" or scheme.symmetric else "no: it reads symmetric gptq alone"),
        ("LMDeploy TurboMind", _turbomind(format_name, scheme, scrambled)),
    ]


def _transformers(format_name: str) -> str:
    packages = {"compressed-tensors": "compressed-tensors", "gptq": "optimum and gptqmodel", "awq": "gptqmodel"}
    return f"yes, with the package{'s' * (format_name == 'gptq')} {packages[format_name]}"


def _vllm(format_name: str, scheme: Scheme) -> str:
    if format_name == "gptq" and not scheme.symmetric:
        return "no: it reads symmetric gptq alone (--sym true, or --format compressed-tensors)"
    return YES


def _turbomind(format_name: str, scheme: Scheme, scrambled: bool) -> str:
    if scheme.bits != 4 or scheme.kind != "int":
        return "no: it reads 4-bit weights alone"
    sizes = TURBOMIND_GROUPS[format_name]
    if scheme.group_size not in sizes:
        return f"no: it needs --group_size {' or '.join(map(str, sizes))}"
    if format_name == "gptq" and (scrambled or not scheme.symmetric):
        return "no: it needs symmetric gptq with static groups"
    return YES
