"""The entry point of `python -m benchmarks.real_eval`."""

from benchmarks.real_eval.command import main

if __name__ == "__main__":
    main()
