//! Plots as SVG, without a library: grouped bars and lines.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// Colours that people with any kind of colour vision can distinguish (Okabe and Ito, 2008), and darker variants.
const COLOURS: [&str; 12] = [
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#666666",
    "#7f5700", "#005a3c", "#6b3b55",
];

/// One row of figures with its name; a figure that was not measured is absent.
#[derive(Debug, Clone)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// One figure for each place on the horizontal axis.
    pub values: Vec<Option<f64>>,
}

/// The texts around the figures, for both kinds of plot.
#[derive(Debug, Clone, Copy)]
pub struct Titles<'t> {
    /// Above the plot.
    pub title: &'t str,
    /// Along the vertical axis, with the unit.
    pub vertical: &'t str,
    /// Places on the horizontal axis.
    pub places: &'t [String],
}

/// Bars in groups, one group for each place.
#[must_use]
pub fn bars(titles: &Titles<'_>, series: &[Series]) -> String {
    let plot = Plot::new(titles, series);
    let mut svg = plot.frame(titles, series);
    let group = plot.place_width();
    let bar = group * 0.86 / series.len().max(1) as f64;
    for (number, row) in series.iter().enumerate() {
        for (place, value) in row.values.iter().enumerate() {
            let Some(value) = value else { continue };
            let x = LEFT + group * (place as f64 + 0.07) + bar * number as f64;
            let (top, bottom) = (plot.y(value.max(0.0)), plot.y(value.min(0.0)));
            let (height, colour) = ((bottom - top).max(0.5), colour(number));
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{bar:.1}\" height=\"{height:.1}\" fill=\"{colour}\">\
                 <title>{}: {value:.2}</title></rect>",
                escape(&row.name)
            );
        }
    }
    svg + "</svg>\n"
}

/// Lines from place to place; places are equally far apart.
#[must_use]
pub fn lines(titles: &Titles<'_>, series: &[Series]) -> String {
    let plot = Plot::new(titles, series);
    let mut svg = plot.frame(titles, series);
    let x = |place: usize| LEFT + plot.place_width() * (place as f64 + 0.5);
    for (number, row) in series.iter().enumerate() {
        let points: Vec<(f64, f64, f64)> = row
            .values
            .iter()
            .enumerate()
            .filter_map(|(place, value)| value.map(|value| (x(place), plot.y(value), value)))
            .collect();
        let path: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
        let colour = colour(number);
        let _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", path.join(" "));
        for (x, y, value) in points {
            let name = escape(&row.name);
            let _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}: {value:.2}</title></circle>"
            );
        }
    }
    svg + "</svg>\n"
}

/// The scale of a plot.
struct Plot {
    low: f64,
    high: f64,
    places: usize,
}

impl Plot {
    fn new(titles: &Titles<'_>, series: &[Series]) -> Self {
        let figures = || series.iter().flat_map(|row| row.values.iter().flatten().copied());
        let low = figures().fold(0.0, f64::min);
        let high = figures().fold(0.0, f64::max);
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, places: titles.places.len().max(1) }
    }

    fn place_width(&self) -> f64 {
        (WIDTH - LEFT - RIGHT) / self.places as f64
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - share)
    }

    /// Draws everything except the figures.
    fn frame(&self, titles: &Titles<'_>, series: &[Series]) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n",
            escape(titles.title)
        );
        let right = WIDTH - RIGHT;
        for value in ticks(self.low, self.high) {
            let y = self.y(value);
            let colour = if value == 0.0 { "#000000" } else { "#cccccc" };
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        for (place, name) in titles.places.iter().enumerate() {
            let (x, y) = (LEFT + self.place_width() * (place as f64 + 0.5), HEIGHT - BOTTOM + 18.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
                escape(name)
            );
        }
        for (number, row) in series.iter().enumerate() {
            let y = TOP + 18.0 * number as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                right + 12.0,
                colour(number),
                right + 30.0,
                y + 11.0,
                escape(&row.name)
            );
        }
        let middle = TOP + (HEIGHT - TOP - BOTTOM) / 2.0;
        let _ = writeln!(
            svg,
            "<text transform=\"translate(16 {middle}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(titles.vertical)
        );
        svg
    }
}

/// Returns four to ten round values from `low` to `high`, with 0 if it lies between.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    // Otherwise multiples of a small step would show digits that come from rounding errors.
    (first..=last).map(|number| (number as f64 * step * 1e6).round() / 1e6).collect()
}

fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_figures() {
        assert_eq!(ticks(0.0, 42.0), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(ticks(-8.0, 20.0), [-5.0, 0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!(ticks(0.0, 0.5), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]);
    }

    #[test]
    fn bars_go_up_and_down_from_zero_and_gaps_stay_empty() {
        let places = ["a".to_owned(), "b".to_owned()];
        let titles = Titles { title: "x < y", vertical: "ms", places: &places };
        let series = [Series { name: "one".into(), values: vec![Some(10.0), None] }];
        let below = [Series { name: "one".into(), values: vec![Some(10.0), Some(-10.0)] }];
        let (svg, both) = (bars(&titles, &series), bars(&titles, &below));
        assert_eq!(svg.matches("<title>").count(), 1);
        assert_eq!(both.matches("<title>").count(), 2);
        assert!(svg.contains("x &lt; y") && svg.ends_with("</svg>\n"));
        // The bar above begins at the top of the plot, the one below ends at its bottom.
        assert!(both.contains("y=\"40.0\"") && both.contains("height=\"166.0\""));
        assert_eq!(lines(&titles, &below).matches("<circle").count(), 2);
    }
}
