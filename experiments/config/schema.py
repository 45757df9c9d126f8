"""What an experiment is, as frozen dataclasses: task, model, training, evaluation, devices and claims."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        kind: Which task: "copy" (from four places at once), "copy_string" (BOS s SEP s), "shift_bank" (from fixed
            distances), "induction" (what followed the last time) or "skills" (fixed distances and induction).
        symbols: How many different values there are to copy.
        length: Tokens in a sequence (copy: half of it is the number of keys); copy_string has lengths of its own.
        shortest: Shortest string of copy_string in training; shortest period of induction and skills.
        longest: Longest string of copy_string in training; longest period of induction and skills.
        farthest: copy_string: longest string in the curve over length.
        offsets: shift_bank: the distances back that are read out.
    """

    kind: Literal["copy", "copy_string", "shift_bank", "induction", "skills"] = "copy"
    symbols: int = 16
    length: int = 32
    shortest: int = 4
    longest: int = 20
    farthest: int = 40
    offsets: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 4, 7])


@dataclasses.dataclass(frozen=True)
class Model:
    """The transformer.

    Attributes:
        num_layers: Layers, one attention in each.
        num_heads: Query heads in each layer.
        num_kv_heads: Key/value heads; null is as many as query heads.
        model_dim: Width of the residual stream.
        head_dim: Dimension of a query/key head.
        value_dim: Dimension of a value head; null is head_dim.
        mlp_dim: Hidden width of the MLP after each attention; 0 leaves it out.
        norm: Whether layer norms stand before attention, MLP and read-out.
        position: How the model knows positions.
        rotary_base: rotary: base of the wavelengths.
        embed_scale: Standard deviation of the embeddings at the start.
    """

    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int | None = None
    model_dim: int = 64
    head_dim: int = 16
    value_dim: int | None = None
    mlp_dim: int = 0
    norm: bool = True
    position: Literal["none", "sinusoidal", "learned", "rotary", "alibi", "relative"] = "learned"
    rotary_base: float = 10000.0
    embed_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Train:
    """How it is trained: AdamW with warm-up, cosine decay and clipping.

    Attributes:
        seeds: How many seeds to train at once.
        first_seed: The first seed; the others follow it.
        steps: Updates.
        batch: Sequences in an update.
        learning_rate: Peak learning rate.
        final_rate: Learning rate at the end, as a fraction of the peak.
        warmup: Steps of linear warm-up.
        b2: Decay of Adam's second moment.
        weight_decay: AdamW's weight decay.
        clip: Largest global norm of a gradient.
        entropy_penalty: Weight in the loss of the heads' mean entropy (0 to 1), which makes them choose.
        place_weights: Weight in the loss of each place that is read out; null is 1 each.
        log_every: Steps over which a line of metrics is averaged.
        look_every: Steps between two looks at the heads.
        checkpoint_every: Steps between two checkpoints, a multiple of look_every.
    """

    seeds: int = 5
    first_seed: int = 0
    steps: int = 800
    batch: int = 32
    learning_rate: float = 3e-3
    final_rate: float = 0.1
    warmup: int = 50
    b2: float = 0.99
    weight_decay: float = 1e-4
    clip: float = 1.0
    entropy_penalty: float = 0.0
    place_weights: list[float] | None = None
    log_every: int = 10
    look_every: int = 50
    checkpoint_every: int = 200


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """How it is judged.

    Attributes:
        batch: Fresh sequences for each seed.
        lengths: copy_string: lengths in the curve over length.
        look_length: shift_bank: tokens in the sequences on which heads are looked at, where the weights of whole
            sequences would not fit; null is task.length. Loss and accuracy are of whole sequences.
    """

    batch: int = 1024
    lengths: list[int] = dataclasses.field(default_factory=list)
    look_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The devices that train together: data x heads x sequence of them, and what is split over each axis.

    Attributes:
        data: Devices that share the sequences of a batch.
        heads: Devices that share the heads of each attention, with their parameters.
        sequence: Devices that share the tokens of each sequence.
    """

    data: int = 1
    heads: int = 1
    sequence: int = 1

    @property
    def size(self) -> int:
        """How many devices that are."""
        return self.data * self.heads * self.sequence


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A sentence encoder that is looked at instead of trained.

    Attributes:
        folder: Folder of a saved model of the BERT family, with config.json, *.safetensors and tokenizer.json.
        package: Installed package that the folder lies in; empty for a folder of its own.
        groups: Groups of sentences that mean the same.
    """

    folder: str = ""
    package: str = ""
    groups: list[list[str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim: a metric, its threshold, and how many seeds must pass it.

    Attributes:
        name: Short name.
        statement: The claim in words.
        metric: A metric of the run, or CONTROL:METRIC for that of a control, or of a point of the sweep as
            OPTION=VALUE:METRIC.
        needed: How many seeds must pass.
        at_least: The metric must reach this; give this or at_most.
        at_most: The metric must not pass this.
    """

    name: str
    statement: str
    metric: str
    needed: int
    at_least: float | None = None
    at_most: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        name: Name of the experiment; the run folder is runs/NAME unless --out says otherwise.
        description: One or two sentences for the top of the report.
        task: What is learned.
        model: The transformer.
        train: How it is trained.
        evaluate: How it is judged.
        mesh: The devices that train together; a run may be resumed on another mesh.
        pretrained: A model to look at; task, model, train and evaluate then have nothing to say.
        controls: Variants for comparison, trained by the same loop: name -> dotted overrides.
        sweep: Option -> values; every combination is one more control, and where the first option has numbers, curves
            are drawn over them.
        claims: What the run is expected to show.
    """

    name: str
    description: str = ""
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    evaluate: Evaluate = dataclasses.field(default_factory=Evaluate)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    pretrained: Pretrained = dataclasses.field(default_factory=Pretrained)
    controls: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    claims: list[Claim] = dataclasses.field(default_factory=list)


SECTIONS = {
    "task": Task,
    "model": Model,
    "train": Train,
    "evaluate": Evaluate,
    "mesh": Mesh,
    "pretrained": Pretrained,
}
