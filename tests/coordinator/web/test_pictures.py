"""Charts of the pages as values."""

from coordinator.web.pictures import of_compared, of_run
from coordinator.web.run_curves import RoundPoint, Spread


class Curves:
    def __init__(self, *means):
        spreads = [Spread(mean, mean, mean, mean, 3) for mean in means]
        self.points = [point(n)._replace(acc={"personal": one}) for n, one in enumerate(spreads, 1)]

    def rounds(self):
        return self.points


def point(number, seconds=1.0):
    return RoundPoint(number, seconds, 0.0, None, None, 3, 0, 0, {}, None)


def test_rounds_that_sent_nothing_to_agents_are_explained():
    def charts(*downs):
        points = [point(n)._replace(bytes_up=1e6 * n, bytes_down=down) for n, down in enumerate(downs, 1)]
        return of_run(points)["bytes"].caption

    assert charts(2e6, 2e6) == ""
    assert "they still had that model" in charts(0.0, 1e6)


def test_slow_first_round_reaches_beyond_the_plot_of_times():
    chart = of_run([point(1, 50.0), point(2, 2.0), point(3, 3.0)])["phases"]
    assert (round(chart.y.high, 6), chart.caption) == (3.3, "Round 1 took 50.0 s; its bar is broken.")
    assert of_run([point(1, 3.5), point(2, 2.0), point(3, 3.0)])["phases"].y.high is None
    assert of_run([point(7, 50.0)])["phases"].caption == ""


def test_lines_that_hide_each_other_are_named():
    runs = [("r1", Curves(0.1, 0.2, 0.3)), ("r2", Curves(0.1, 0.2)), ("r3", Curves(0.1, 0.9)), ("r4", Curves(0.5))]
    caption = of_compared(runs)["personal"].caption
    assert caption == "Mean over agents. The lines of r1, r2 coincide as far as they go."
