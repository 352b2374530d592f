"""digits: A Flower app with NumPyClient."""

from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from digits.task import get_initial_weights


def weighted_average(metrics):
    total = sum(num_examples for num_examples, _ in metrics)
    return {"accuracy": sum(num_examples * m["accuracy"] for num_examples, m in metrics) / total}


def server_fn(context: Context):
    # Define strategy
    strategy = FedAvg(
        fraction_fit=context.run_config["fraction-fit"],
        initial_parameters=ndarrays_to_parameters(get_initial_weights()),
        evaluate_metrics_aggregation_fn=weighted_average,
    )
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])

    return ServerAppComponents(strategy=strategy, config=config)


# Create ServerApp
app = ServerApp(server_fn=server_fn)
