from dynamo.common.backend.run import run

from winnow_dynamo.worker import WinnowEngine

if __name__ == "__main__":
    run(WinnowEngine)
