"""Train a decoder with reinforcement learning: the trainer of such a run.

    sbatch scripts/slurm/rl.sh configs/rl/arithmetic.toml
    python scripts/rl.py configs/rl/arithmetic.toml         one process, by hand

It matches scripts/train.py step for step; its batches come from the orchestrator and its weights
go to the engines (kempner/extensions/rl/trainer/feed.py): step n waits for the batch that the
orchestrator has made of samples of version n - 1 or, with rl.max_async, of earlier ones, trains on
it, and publishes version n. Exit code 0 after any orderly end, 2 on bad input; details are in
status.json."""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

    from kempner.extensions.rl.extension import RlExtension
    from kempner.train.configure import configure
    from kempner.train.resilience import requests
    from kempner.train.resilience.requests import StopRequests

    STOP = StopRequests()  # first of all: a signal during the imports must not kill us
    CFG = configure(sys.argv[1:], STOP, RlExtension)  # --help, --check and bad input end here

    # Only now: it imports torch.
    import train

    requests.end_process(train.main(CFG, STOP))
