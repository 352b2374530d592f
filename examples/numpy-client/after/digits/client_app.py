"""digits: A Flower app with NumPyClient."""

from fedcomp_clients import compress_mod
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context

from digits.task import load_data, test, train


class FlowerClient(NumPyClient):
    """Trains a softmax regression on the local digits."""

    def __init__(self, trainset, testset, local_epochs):
        self.trainset = trainset
        self.testset = testset
        self.local_epochs = local_epochs

    def fit(self, parameters, config):
        weights = train(parameters, self.trainset, self.local_epochs)
        return weights, len(self.trainset[1]), {}

    def evaluate(self, parameters, config):
        loss, accuracy = test(parameters, self.testset)
        return loss, len(self.testset[1]), {"accuracy": accuracy}


def client_fn(context: Context):
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainset, testset = load_data(partition_id, num_partitions)
    return FlowerClient(trainset, testset, context.run_config["local-epochs"]).to_client()


# Flower ClientApp
app = ClientApp(client_fn, mods=[compress_mod])
