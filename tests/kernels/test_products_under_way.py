"""The check that compiled kernels wait for products before their operands' registers are written again."""

import pytest

from tests.kernels.hopper import products_left_under_way

LOOP = """
    %total:2 = scf.for %step = %c0 to %end step %c1 iter_args(%sums = %zero, %at = %c0) -> (T, i32) {
      %codes = ttg.local_load %stage : !ttg.memdesc<64x32xi16> -> tensor<64x32xi16, #ttg.dot_op<{opIdx = 0}>>
      %product = ttng.warp_group_dot %queries, %keys, %zero {isAsync = true} : !ttg.memdesc<64x32xbf16> * X
      %scores:2 = ttng.warp_group_dot_wait %product, %keys {pendings = PENDING : i32} : tensor<64x8xf32, #mma>
      %left = arith.mulf SOURCE, %scale : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0}>>
      %added = ttng.warp_group_dot %left, %values, %sums {isAsync = true} : tensor<64x32xbf16, #ttg.dot_op<{}>> * X
      %done = ttng.warp_group_dot_wait %added {pendings = 0 : i32} : tensor<64x8xf32, #mma>
      scf.yield LEFT, %next : tensor<64x8xf32, #mma>, i32
    }
"""


@pytest.mark.parametrize(("source", "pending", "left", "found"), [
    ("%codes", 0, "%added", ["%added"]),
    ("%codes", 0, "%done", []),
    ("%scores#0", 0, "%added", []),
    ("%scores#0", 1, "%added", ["%added"]),
])  # fmt: skip
def test_products_may_go_on_where_their_operands_wait(source, pending, left, found):
    text = LOOP.replace("SOURCE", source).replace("PENDING", str(pending)).replace("LEFT", left)
    assert products_left_under_way(text) == found
