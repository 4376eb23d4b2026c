"""Sizes of blocks: Triton's are powers of two."""


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
