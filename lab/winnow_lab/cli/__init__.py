"""The commands that join `winnow` where the lab is installed."""

MODULES = "winnow_lab.cli.{}"
COMMANDS = {
    "eval": "measure what eviction costs in accuracy, on tasks with right answers",
    "bench": "measure how fast it is here, beside the machine's limits",
    "plan": "tell what fits on which hardware, how fast it is there, and what binds",
    "tune": "find the policy that keeps your prompts' answers at the highest throughput",
    "simulate": "serve a trace of requests on hardware that is not there",
}
