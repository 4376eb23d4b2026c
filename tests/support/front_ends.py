"""Front ends without a server around them."""

import asyncio

from bladellm_runtime.server.front_ends import FrontEnds


def keep_one_that_served(several: FrontEnds) -> "asyncio.Task[None]":
    """The task that starts front end 1 again whenever it ends, as if the first one had served before."""
    served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served.set_result(None)
    several._serving[1] = served
    return asyncio.create_task(several._keep(1))
