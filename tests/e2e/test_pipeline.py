"""Three processes hold one model together and train it; one of them is killed, and the others go on past it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("pipeline_process.py")
ALL = list(range(5))


def test_three_processes_hold_one_model():
    processes = [
        subprocess.Popen([sys.executable, SCRIPT, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for index in range(3)
    ]
    origin = processes[0]

    def tell(process, text):
        process.stdin.write(text + "\n")
        process.stdin.flush()

    def result():
        return json.loads(origin.stdout.readline())

    try:
        records = [process.stdout.readline().strip() for process in processes]
        for process in processes:
            tell(process, json.dumps(records))
        losses = []
        for _ in range(4):
            tell(origin, "step")
            assert origin.stdout.readline() == "begins\n"
            done = result()
            assert done["finished"] == ALL and done["counted"] == {"1": ALL, "2": ALL}, done
            assert not done["skipped"] and not done["lost"]
            losses.append(done["loss"])
        assert losses[-1] < losses[0] - 0.02
        tell(origin, "step")
        assert origin.stdout.readline() == "begins\n"
        processes[1].kill()
        done = result()
        assert done["finished"] == ALL and done["counted"]["2"] == ALL, done
        tell(origin, "step")
        assert origin.stdout.readline() == "begins\n"
        done = result()
        assert done["finished"] == ALL and done["counted"] == {"2": ALL}, done
        assert done["skipped"] == {str(micro): [1] for micro in ALL}
        for process in (origin, processes[2]):
            process.stdin.close()
            assert process.wait(20) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stdin.close()
