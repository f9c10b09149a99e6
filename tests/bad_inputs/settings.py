"""Names, numbers, combinations, overrides and sweeps."""

from __future__ import annotations

from undrift.errors import ConfigError

from .case import Case, command, left_no, made, python, ran, setting, then

NAMES, RANGES = "Names that nobody knows", "Types and ranges"
FIT, SWEEPS = "What does not fit together", "Overrides and sweeps"
NOTHING = left_no("runs")
HUNDRED = list(range(1, 101))

NAME_CASES = [
    setting(NAMES, "an algorithm", "algorithm.use=fedavgg", r"Did you mean 'fedavg'\?"),
    setting(
        NAMES,
        "a part of an algorithm",
        "\"algorithm={rules=[{use='Prx'}]}\"",
        r"algorithm\.rules\[0\]\.use: .*Did you mean 'Prox'\?",
    ),
    setting(
        NAMES,
        "a partition",
        "\"partition={use='dirichlet', clients=3}\"",
        r"partition\.use: no partition named 'dirichlet'\. Did you mean 'dirichlet_",
    ),
    setting(NAMES, "a source of data", "data=mnst", r"data\.use: .*Did you mean 'mnist'\?"),
    setting(NAMES, "a model", "model.use=mpl", r"model\.use: .*Did you mean 'mlp'\?"),
    setting(NAMES, "a model that is nothing like ours", "model.use=resnet18", r"Known: mlp"),
    setting(NAMES, "a sampler", "sampler.use=unifrm", r"Did you mean 'uniform'\?"),
    setting(NAMES, "a section", "modle.use=mlp", r"no section named 'modle'\. .*'model'\?"),
    setting(NAMES, "a setting", "algorithm.lrr=0.1", r"algorithm 'fedavg': .*mean 'lr'\?"),
    setting(NAMES, "a setting of the model", "model.hiden=8", r"model 'mlp': .*mean 'hidden'\?"),
    setting(NAMES, "a setting of the data", "data.client=3", r"data 'synthetic': .*'clients'\?"),
    setting(NAMES, "a loss", "task.loss=crossentropy", r"task\.loss: .*'cross_entropy'\?"),
    setting(NAMES, "a metric to judge by", "evaluate.metrics=auk", r"evaluate\.metrics: .*'auc'\?"),
    setting(NAMES, "an engine", "engine.use=vectorized", r"engine\.use: .*'vectorised'\?"),
    setting(NAMES, "a device", "engine.device=gpu", r"no device 'gpu': use 'cpu', 'cuda'"),
    setting(NAMES, "a tracker", "--track tensorbord", r"Did you mean 'tensorboard'\?"),
    command(NAMES, "a command", "undrift rn my.toml", r"invalid choice: 'rn'"),
    command(NAMES, "an option", "undrift run my.toml --fast", r"unknown arguments: --fast"),
    command(NAMES, "a kind", "undrift list sampler", r"Did you mean 'samplers'\?"),
    command(NAMES, "a shipped experiment", "undrift run digit", r"Did you mean 'digits'\?"),
    command(NAMES, "data to obtain", "undrift data get mnst", r"Did you mean 'mnist'\?"),
    command(
        NAMES,
        "a metric",
        "undrift compare my.toml --metric test_acuracy",
        r"Did you mean 'test_accuracy'\?",
        after=made("runs/my/fedavg/seed-0/rounds.jsonl"),
    ),
    command(
        NAMES,
        "a variant to compare with",
        "undrift report runs/my --baseline fedag",
        r"no variant named 'fedag'\. Did you mean 'fedavg'\?",
        before=ran("undrift run my.toml"),
    ),
    command(
        NAMES,
        "a name to show",
        "undrift show fedavgg",
        r"Did you mean 'fedavg'\?",
    ),
    command(
        NAMES,
        "no experiment at all",
        "undrift run",
        r"required: EXPERIMENT$",
    ),
]

RANGE_CASES = [
    setting(RANGES, "a negative learning rate", "algorithm.lr=-1", r"lr = -1\.0 is outside"),
    setting(RANGES, "a learning rate that is no number", "algorithm.lr=nan", r"lr = nan is"),
    setting(
        RANGES,
        "an infinite learning rate",
        "algorithm.lr=inf",
        r"lr = inf .*(finite|inf\))",
    ),
    setting(RANGES, "a text for a number", "algorithm.lr=fast", r"lr must be a number, got 'fast'"),
    setting(RANGES, "true for a number", "algorithm.lr=true", r"lr must be a number, got True"),
    setting(RANGES, "nothing behind the sign", "algorithm.lr=", r"lr must be a number, got ''"),
    setting(RANGES, "no round", "rounds=0", r"rounds must be a whole number, 1 or more; got 0"),
    setting(RANGES, "half a round", "rounds=2.5", r"rounds must be a whole number.*got 2\.5"),
    setting(RANGES, "a negative seed", "seed=-1", r"seed must be a whole number, 0 or more"),
    setting(RANGES, "a huge seed", "seed=99999999999999999999", r"seed = 9+ needs more than 63"),
    setting(
        RANGES,
        "a share above 1",
        "\"sampler={use='uniform', fraction=1.5}\"",
        r"fraction = 1\.5 is outside \(0, 1\]",
    ),
    setting(
        RANGES,
        "a concentration of 0",
        "\"partition={use='dirichlet_client', clients=3, alpha=0}\"",
        r"partition: .*alpha = 0\.0 is outside",
    ),
    setting(RANGES, "an empty batch", "work.batch=0", r"batch must be a whole number, 1 or more"),
    setting(
        RANGES,
        "a range that is reversed",
        '"work={epochs={low=5, high=1}}"',
        r"epochs = \(5, 1\): the low end exceeds the high end",
    ),
    setting(RANGES, "half a range", '"work={epochs={low=5}}"', r"a range has `low` and `high`"),
    setting(RANGES, "no runs at a time", "--jobs 0", r"jobs = 0: .* 1 or more"),
    setting(RANGES, "a text for the jobs", "--jobs many", r"argument --jobs: .*'many'"),
    setting(RANGES, "evaluation every 0 rounds", "evaluate.every=0", r"evaluate\.every must be"),
    setting(RANGES, "a text for the target", "evaluate.target=high", r"evaluate\.target must be a"),
    setting(RANGES, "a word for true or false", "evaluate.clients=maybe", r"is true or false"),
    setting(
        RANGES, "baselines of some", "evaluate.baselines=some", r"'auto', true or false.*'some'"
    ),
    setting(RANGES, "a layer of no width", "model.hidden=0", r"hidden must be at least 1, got 0"),
    setting(
        RANGES,
        "a word for a width",
        "model.hidden=wide",
        r"hidden .*got 'wide'",
    ),
    setting(RANGES, "everything held out", "hold.client_test=1", r"must lie in \[0, 1\)"),
    setting(RANGES, "half precision", "task.dtype=float16", r"Known: float32, float64"),
    command(RANGES, "no seeds", "undrift compare my.toml --seeds 0", r"a number of seeds, 1 or"),
    command(
        RANGES,
        "a target that is no number",
        "undrift compare my.toml --target nan",
        r"nan",
    ),
    setting(
        RANGES,
        "a word for a switch of the data",
        "data.iid=maybe",
        r"iid .*true or false",
    ),
    setting(
        RANGES,
        "a word for a switch of the algorithm",
        "algorithm.by_size=maybe",
        r"by_size .*(true or false|True)",
    ),
    setting(
        RANGES,
        "a model that fits no memory",
        "model.hidden=1000000000000000",
        r"memory",
    ),
    setting(
        RANGES,
        "a batch beyond 64 bits",
        "work.batch=1000000000000000000000",
        r"batch",
    ),
    setting(
        RANGES,
        "more workers than clients",
        "engine.workers=100000",
        r"2 rounds",
        0,
    ),
]

FIT_CASES = [
    setting(
        FIT,
        "a batch larger than the data: trains on all of it",
        "work.batch=100000",
        r"2 rounds",
        0,
    ),
    setting(
        FIT,
        "a learning rate at which training diverges: the model stays as it was",
        "algorithm.lr=1e38 work.steps=9",
        r"2 of 2 rounds, .* changed nothing: every client's update was left out",
        1,
    ),
    setting(
        FIT,
        "more clients than there are",
        "sampler.count=99",
        r"count = 99 but only 6 clients are enrolled; lower the count",
    ),
    Case(
        FIT,
        "a mistake, corrected",
        "undrift run my.toml sampler.count=99; undrift run my.toml",
        then(ran("undrift run my.toml sampler.count=99", 2), ran("undrift run my.toml")),
        0,
        "",
    ),
    setting(
        FIT,
        "a list of clients shorter than the rounds",
        "\"sampler={use='explicit', rounds=[[0, 1]]}\"",
        r"rounds",
        after=NOTHING,
    ),
    setting(
        FIT,
        "FedNova with RmsProp",
        "\"algorithm={use='fednova', local={use='RmsProp'}}\"",
        r"RmsProp does not have: use Sgd, HeavyBall or Nesterov",
    ),
    setting(
        FIT,
        "FedNova with clipping",
        "\"algorithm={use='fednova', local={use='Sgd', clip=1.0}}\"",
        r"clipping at 1\.0 destroys: leave clip out",
    ),
    setting(
        FIT,
        "two learning rates",
        "\"algorithm={use='scaffold', lr=0.1, local={use='Sgd', lr=0.2}}\"",
        r"give the learning rate once",
    ),
    setting(
        FIT,
        "a rule as local optimizer",
        "\"algorithm={local={use='Prox'}}\"",
        r"local must be a local optimizer such as Sgd",
    ),
    setting(FIT, "epochs and steps", "work.epochs=3", r"give one of them"),
    setting(
        FIT,
        "cross-entropy on numbers",
        "\"data={use='synthetic-regression', clients=6, sizes=20}\" task.loss=cross_entropy",
        r"needs classes; these targets are numbers",
    ),
    setting(
        FIT,
        "metrics of numbers for classes",
        'evaluate.metrics=\'["auc", "rmse", "r2"]\'',
        r"\['rmse', 'r2'\]: targets that are classes have none of these; choose from accuracy",
    ),
    setting(
        FIT,
        "class weights for other classes",
        "task.class_weights='[1, 2]'",
        r"\[1\.0, 2\.0\] has 2 weights for 3 classes: give one for each",
    ),
    setting(
        FIT,
        "a gamma without the loss that has one",
        "task.gamma=2",
        r"task\.gamma belongs to task\.loss = 'focal', not to 'auto'",
    ),
    setting(FIT, "counts from classes", "task.loss=poisson", r"needs counts; these targets are"),
    setting(FIT, "squared error on classes", "task.loss=mse", r"needs numbers; these targets are"),
    setting(
        FIT,
        "accuracy by class of numbers",
        "\"data={use='synthetic-regression', clients=6, sizes=20}\" evaluate.per_class=true",
        r"evaluate\.per_class needs classes",
    ),
    setting(
        FIT,
        "pictures mirrored that are none",
        "task.flip=0.5",
        r"task\.flip and task\.crop need pictures; inputs are \[5\]",
    ),
    setting(
        FIT,
        "convolutions on a flat input",
        "model=feddyn_cnn",
        r"model 'feddyn_cnn'.*conv2d",
    ),
    setting(
        FIT,
        "fewer outputs than classes",
        "model.classes=2",
        r"client 0 has the label 2, but the module has 2 outputs",
    ),
    setting(FIT, "more inputs than the data have", "model.inputs=3", r"fails on inputs \(2, 5\)"),
    setting(
        FIT,
        "a chunk in the reference engine",
        "engine.use=reference engine.chunk=3",
        r"engine\.workers and engine\.precision belong to engine\.use = 'vectorised'",
    ),
    setting(
        FIT,
        "actors without Ray",
        "engine.actors=2",
        r"engine\.actors belongs to engine\.use = 'ray'",
    ),
    setting(
        FIT,
        "data without owners and no partition",
        "data=digits",
        r"'digits' do not say who owns an example: add a \[partition\]",
    ),
    setting(
        FIT,
        "fewer examples than clients",
        "\"partition={use='iid', clients=500}\"",
        r"108 examples cannot give 500 clients one each; ask for 108 clients",
    ),
    setting(
        FIT,
        "tests of clients that have one example",
        "data.sizes=1 hold.client_test=0.5",
        r"hold\.client_test",
    ),
    setting(
        FIT,
        "a feature layer that is not there",
        "task.feature=body",
        r"no layer named 'body'\. Known: flatten",
    ),
    python(
        FIT,
        "a trainer that has no clients to judge",
        "fl.run(trainer(), rounds=1, test=(x, y), evaluate=fl.Evaluation(clients=True))",
        ConfigError,
        r"clients",
    ),
]

SWEEP_CASES = [
    setting(SWEEPS, "a name without a value", "rounds", r"'rounds' is no setting: write sect"),
    setting(
        SWEEPS,
        "a name without a value, behind an option",
        "--jobs 1 rounds",
        r"'rounds' is no setting",
    ),
    setting(SWEEPS, "a value without a name", "=3", r"'=3' is no setting: write section\.name"),
    setting(SWEEPS, "two dots", "algorithm..lr=1", r"'algorithm\.\.lr=1' is no setting"),
    setting(SWEEPS, "half a list", "'seed=[1'", r"cannot read the value '\[1'"),
    setting(
        SWEEPS,
        "a word without quotes in a table",
        '"model={use=mlp}"',
        r"inside brackets it must be TOML",
    ),
    setting(
        SWEEPS,
        "a setting inside a number",
        "rounds.x=1",
        r"'rounds' is the value 2 and has no settings inside",
    ),
    setting(SWEEPS, "an empty list", "'algorithm.lr=[]'", r"an empty list leaves nothing to run"),
    setting(SWEEPS, "the same seed twice", "seed=0,0", r"'fedavg' with seed 0 is there twice"),
    setting(SWEEPS, "the same value twice", "algorithm.lr=0.1,0.1", r"is there twice: name every"),
    setting(
        SWEEPS,
        "one label for two variants",
        "label=mine algorithm.lr=0.1,0.2",
        r"two variants are called 'mine'",
    ),
    command(
        SWEEPS,
        "a million combinations",
        "undrift run my.toml seed=[0, 1, ...] rounds=[1, 2, ...] evaluate.every=[1, 2, ...]",
        r"more than 10000 combinations, with 100 values of \S+: shorten its lists",
        words=["run", "my.toml", *(f"{n}={HUNDRED}" for n in ("seed", "rounds", "evaluate.every"))],
    ),
    command(
        SWEEPS,
        "algorithms without `use`",
        "undrift run my.toml algorithm=fedavg,scaffold",
        r"runs/my/fedavg/seed-0",
        0,
        after=made("runs/my/scaffold/seed-0/summary.json"),
    ),
    setting(
        SWEEPS,
        "the first of two variants fails: the second still runs",
        "model.classes=2,3",
        r"the module has 2 outputs",
        after=made("runs/my/fedavg_classes=3/seed-0/summary.json"),
    ),
    command(
        SWEEPS,
        "an evaluation of something else",
        "undrift evaluate runs/my/fedavg/seed-0 algorithm.lr=3",
        r"only evaluate\.\* and engine\.device may change here",
        before=ran("undrift run my.toml"),
    ),
    command(
        SWEEPS,
        "an evaluation of what was not kept",
        "undrift evaluate runs/my/fedavg/seed-0 evaluate.models=avg",
        r"did not keep",
        before=ran("undrift run my.toml"),
    ),
]

CASES: list[Case] = [*NAME_CASES, *RANGE_CASES, *FIT_CASES, *SWEEP_CASES]
