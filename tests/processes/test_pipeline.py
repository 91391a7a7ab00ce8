"""Three processes share one model and train it; one is killed, and the others continue without it."""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
import uvloop
from kit.programs import pipeline_process as shared
from thinwire.node.membership.handler import Topic
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.timeouts import Timeouts

SCRIPT = shared.__file__
ALL = frozenset(range(5))


@pytest.mark.trial
def test_three_processes_train_one_model_and_survive_a_kill():
    hosts = [
        subprocess.Popen([sys.executable, SCRIPT, str(stage)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for stage in (1, 2)
    ]
    first, second = (shared.identity(stage).peer_id for stage in (1, 2))

    async def main():
        member = shared.Member(0)
        records = [await member.open(), *[(await shared.work(host.stdout.readline)).strip() for host in hosts]]
        for host in hosts:
            host.stdin.write(json.dumps(records) + "\n")
            host.stdin.flush()
        presence = member.meet(records)
        origin = Origin(
            member.section,
            member.update,
            member.boundary,
            StageHolders({1: [first], 2: [second]}),
            member.context,
            patience=Timeouts(member.now, first=60.0, least=30.0),
            window=3,
            clip=1.0,
        )
        presence.attach(Topic.STAGES, origin)
        task = asyncio.create_task(presence.run())
        rows = torch.randint(0, 40, (len(ALL), 2, 129), generator=torch.Generator().manual_seed(1))
        batches = [(row[:, :-1], row[:, 1:]) for row in rows]
        losses = []
        for _ in range(4):
            done = await origin.step(batches)
            assert done.finished == ALL and done.counted == {1: {first: ALL}, 2: {second: ALL}}, done
            assert not done.skipped and not done.lost
            losses.append(done.loss)
        assert losses[-1] < losses[0] - 0.02
        step = asyncio.create_task(origin.step(batches))
        await asyncio.sleep(0)
        hosts[0].kill()
        done = await step
        assert done.finished == ALL and done.counted[2] == {second: ALL}, done
        done = await origin.step(batches)
        assert done.finished == ALL and done.counted == {2: {second: ALL}}, done
        assert done.skipped == {micro: (1,) for micro in ALL}
        task.cancel()
        await presence.close()

    try:
        uvloop.run(main())
        hosts[1].stdin.close()
        assert hosts[1].wait(30) == 0
    finally:
        for host in hosts:
            host.kill()
            host.wait()
            host.stdout.close()
            host.stdin.close()
