'''Figures: one file each, found by its name. Input is the tables of one experiment, nothing else.

A figure is a module `plots/NAME.py`, or one that a package registers under the entry point `thinpipe.figures`.
No other file is edited for it: `thinpipe run` and `thinpipe plot` draw it, and tests/contract/test_figures.py
holds it to what follows.

    VERSION, SUMMARY, SOURCE, PARAMETERS   literals, as in every plug-in; PARAMETERS = {}, or {"per_run": True} for a
                                           figure of one run: drawn by `thinpipe plot NAME RUN_ID` alone, and given
                                           that run's tables, its spans too; or {"of_codecs": True}: drawn by
                                           `thinpipe codecs measure` of its table rate_distortion; likewise
                                           {"of_simulation": True}: by `thinpipe simulate --against`, of predictions
    NAME, COLUMNS                          the file's stem; for captions: "table runs (arm, seed, ...)"
    figures(tables) -> [(stem, figure)]    stem: NAME, or NAME.PART where several parts have one
    REQUIRES = ("runs",)                   optional: tables it reads, of runs, steps, transfers, evals, curves (loss
                                           against time, composed or measured), composition; of one run also spans
    draw(tables, out_dir) -> paths         optional: for what is no matplotlib figure; else PNG, PDF and SVG

`tables` maps a table's name to a DataFrame with the columns of harness/metrics.py. What a figure must do:

- draw one figure a part of the experiment (`select.per_part`), and raise UserError where the tables hold nothing
  for it: all runs failed, none of the kind it needs, none with a finite number (`select.timed`, `select.trained`
  with the columns it needs, and `select.caption` do);
- never average different settings: `select.one_setting(runs, columns that set a point apart)`, or `select.once`
  where the network does not matter;
- look the same as the others: colour, marker and line from `style.method`; a run whose fidelity is not ok has a
  hollow mark (`select.flagged`; a `*` in text) and the legend or caption says "flagged" (`style.notes`);
- label every axis, and say in the caption experiment, part, columns, seeds and what was left out.

A whole one, plots/final_loss.py (the contract tests run it as it stands here):

    """Held-out loss at the end of training: a mark a method."""

    import functools

    from thinpipe.plots import _select as select
    from thinpipe.plots import style

    VERSION = 1
    SUMMARY = "held-out loss at the end, one mark a method"
    SOURCE = "thinpipe"
    PARAMETERS = {}
    NAME = "final_loss"
    COLUMNS = "table runs (arm, seed, final_eval_loss, fidelity)"


    def figures(tables):
        runs = select.trained(tables, ["final_eval_loss"])
        return select.per_part(NAME, runs, functools.partial(one, tables))


    def one(tables, part, runs):
        runs = select.once(runs)
        arms = style.methods(runs["arm"])
        fig = style.new_figure(1, 1)
        ax = fig.add_subplot(ylabel="final held-out loss (nat a token)")
        counts = []
        for x, arm in enumerate(arms):
            own = runs[runs["arm"] == arm.label]
            flags, bar = select.flagged(own), select.bar(own["final_eval_loss"])
            style.seeds(ax, arm, [x] * len(own), list(own["final_eval_loss"]), flags)
            style.means(ax, arm, [x], [bar], [any(flags)])
            counts.append(bar.n)
        ax.set_xticks(range(len(arms)), [arm.label for arm in arms], rotation=60, ha="right")
        text = select.caption(tables, part, COLUMNS, counts, timing=False, left_out=("failed", "diverged"))
        style.finish(fig, f"Held-out loss, part {part}", text, style.notes(flagged=any(select.flagged(runs))))
        return fig
'''
