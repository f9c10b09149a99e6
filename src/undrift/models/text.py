"""Networks that read sequences of token ids: an embedding, an LSTM, a linear layer.

Shapes.  B rows, T steps, V words of the vocabulary, D width of the embedding, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undrift.models.settings import whole
from undrift.models.table import Table, read_table


def sent140_lstm(
    classes: int = 2,
    vocabulary: int = 3000,
    width: int = 300,
    hidden: int = 256,
    embedding: Table | None = None,
) -> nn.Module:
    """Make rFedAvg's network for Sent140: word vectors that stay as they are, id 0 is padding.

    `embedding` gives the vectors, [vocabulary, width]; without it random ones stand in.
    """
    table = read_table(embedding, whole("vocabulary", vocabulary), whole("width", width))
    embed = nn.Embedding.from_pretrained(table, freeze=True, padding_idx=0)
    return Reader(embed, whole("hidden", hidden), whole("classes", classes))


def shakespeare_lstm(
    classes: int = 80, vocabulary: int | None = None, width: int = 8, hidden: int = 256
) -> nn.Module:
    """Make a network that reads characters and tells the next: all steps are real.

    `vocabulary` counts what it reads, `classes` what it may answer: the same unless told.
    """
    words = whole("vocabulary", classes if vocabulary is None else vocabulary)
    embed = nn.Embedding(words, whole("width", width))
    return Reader(embed, whole("hidden", hidden), whole("classes", classes))


class Reader(nn.Module):
    """Reads ids [B, T] and answers from the LSTM's output at one step: the feature, [B, H].

    That is the last step or, if the embedding has a padding row, the last one that is no padding.
    """

    def __init__(self, embed: nn.Embedding, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = embed
        self.lstm = nn.LSTM(embed.embedding_dim, hidden, num_layers=2, batch_first=True)
        self.feature = nn.Identity()
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give one score per class, [B, classes]."""
        ids = x.long()  # examples may be kept in a byte each
        outputs = self.lstm(self.embed(ids))[0]
        padding = self.embed.padding_idx
        last = outputs[:, -1] if padding is None else last_real(outputs, ids != padding)
        answer: Tensor = self.head(self.feature(last))
        return answer


def last_real(outputs: Tensor, real: Tensor) -> Tensor:
    """Take each row's output at its last real step, [B, T, H] -> [B, H]; the first if none is.

    >>> last_real(torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [0, 0, 0]]) > 0)
    tensor([[1.],
            [3.]])
    """
    steps = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, steps, 0).amax(1, keepdim=True)
    # A selection and a sum, not `gather`: going back, that would add with atomics.
    return torch.where((steps == last)[..., None], outputs, 0.0).sum(1)
