"""Play a short swarm of a family; print its name and the kernels that were compiled although `compile_kernels` had run.

Argument: name of the family (thinwire.sims.trials.families).
"""

import asyncio
import sys

from numba.core.dispatcher import Dispatcher
from thinwire.node.methods.kernel_compilation import compile_kernels
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families
from thinwire.sims.trials.trial import PACE
from thinwire.swarm.manifest.parser import parse

late: set[str] = set()
compiled = Dispatcher.compile


def noted(self, signature):
    late.add(f"{self.py_func.__module__}.{self.py_func.__name__}{signature}".replace(" ", ""))
    return compiled(self, signature)


async def work(function):
    function()


def main(family):
    scenario = families.scenario(family, 3)
    asyncio.run(compile_kernels(parse(scenario.manifest), work))
    Dispatcher.compile = noted
    simulate(scenario.with_(faults=()), preset=PACE)
    print(family, *sorted(late))


if __name__ == "__main__":
    main(sys.argv[1])
