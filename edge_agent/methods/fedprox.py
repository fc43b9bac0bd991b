"""FedProx: FedAvg with a proximal term towards the global model in local training.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: devices are drawn evenly and weighted by their samples, as usual, where the paper draws by
samples and weighs evenly. Every device does all E epochs; the paper's devices may stop early. The proximal
term acts on weights, not on running statistics. The reported loss is the cross entropy alone.
"""

from __future__ import annotations

from ..core.task import Tensors
from ..training.loops import TrainingOptions, cross_entropy, train
from . import Choices, Client, Method, MethodParams, searched


class FedProxParams(MethodParams):
    """FedAvg's, and the weight of the proximal term."""

    mu: float = searched(
        0.01,
        Choices((0.001, 0.01, 0.1, 1.0)),
        ge=0,
        description="mu in Eq. 2; FedBN's code 0.01, the paper tries 0.001 to 1; 0: FedAvg",
    )


class FedProx(Method):
    """FedAvg whose clients minimize F(w) + mu / 2 |w - w_t|^2, with w_t the model that they received."""

    Params = FedProxParams
    source = "Li et al., FedProx, MLSys 2020"

    def one_pass(self) -> bool:
        """Return True: w_t is the received model, and the paper has slow clients do less work."""
        return True

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of cross entropy, with the gradient of mu / 2 |w - w_t|^2 added before each step."""
        pairs = [(w, w.detach().clone()) for w in client.model.parameters()]

        def add_proximal_gradient() -> None:
            for w, w_t in pairs:
                if w.grad is not None and self.params.mu:
                    w.grad.add_(w.detach() - w_t, alpha=self.params.mu)

        loss = cross_entropy(client.model)
        mu = self.params.mu
        train(
            client, loss, self.params, before_step=add_proximal_gradient, options=TrainingOptions(suspects={"mu": mu})
        )
        return self.sent(client)
