"""One probe in a process of its own: arguments as JSON on standard input, the finding as JSON on standard output."""

import importlib
import os
import sys

import msgspec

from bladellm_runtime.errors import UserError
from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.catalog import CHECKS
from bladellm_tools.check.finding import Finding, failed


def main() -> None:
    """Run the probe named on the command line."""
    # Libraries print on standard output; keep the finding apart from their noise.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    args = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckArgs)
    answer.write(msgspec.json.encode(probe(sys.argv[1], args)))
    answer.close()


def probe(name: str, args: CheckArgs) -> Finding:
    """The finding of one check; whatever it raises is a FAILED."""
    module, function = CHECKS[name].split(":")
    try:
        finding = getattr(importlib.import_module(module), function)(args)
    except UserError as error:
        return failed(str(error))
    except Exception as error:
        return failed(f"the check raised {type(error).__name__}: {error}")
    return msgspec.convert(finding, Finding, from_attributes=True)


if __name__ == "__main__":
    main()
