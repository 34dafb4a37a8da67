//! `[[overlay.link]]`.

use super::super::{At, OverlayLink, OverlayNode, raw};
use super::Check;

/// Lowest and highest rate, bits per second.
const RATES: std::ops::RangeInclusive<u64> = 64_000..=100_000_000_000;

impl Check<'_> {
    /// Checks the rates of links.
    pub(super) fn overlay_links(
        &mut self,
        overlay: &raw::Overlay,
        nodes: &[OverlayNode],
    ) -> Vec<OverlayLink> {
        let mut links: Vec<OverlayLink> = Vec::new();
        for entry in &overlay.link {
            let Some(link) = self.overlay_link(entry, nodes) else { continue };
            let [one, other] = &link.between;
            if links.iter().any(|known| known.between.contains(one) && known.between.contains(other)) {
                let help = "keep one entry for the two nodes";
                self.error(
                    entry.span(),
                    format!("a second rate for the link between '{one}' and '{other}'"),
                    help,
                );
                continue;
            }
            links.push(link);
        }
        links
    }

    fn overlay_link(&mut self, link: &At<raw::OverlayLink>, nodes: &[OverlayNode]) -> Option<OverlayLink> {
        let bought = link.bought.as_deref().copied().unwrap_or(false);
        let between = self.between(link, nodes);
        let Some(text) = &link.rate else {
            let (message, help) = if bought {
                (
                    "a bought link without a rate: without congestion control, nothing else limits what it sends",
                    "write `rate = \"200Mbit/s\"`: the bandwidth that was bought, or a little less",
                )
            } else {
                ("this link has no rate", "write `rate = \"200Mbit/s\"`")
            };
            self.error(link.span(), message, help);
            return None;
        };
        let Some(rate) = bits_per_second(text.as_str()).filter(|rate| RATES.contains(rate)) else {
            let help = "write a number and kbit/s, Mbit/s or Gbit/s, from \"64kbit/s\" to \"100Gbit/s\"";
            self.error(text.span(), format!("\"{}\" is not a rate", text.as_str()), help);
            return None;
        };
        Some(OverlayLink { between: between?, rate, bought })
    }

    fn between(
        &mut self,
        link: &At<raw::OverlayLink>,
        nodes: &[OverlayNode],
    ) -> Option<[std::sync::Arc<str>; 2]> {
        let help = "write `between = [\"…\", \"…\"]`: two of the names of [overlay.node]";
        let Some(names) = &link.between else {
            self.error(link.span(), "this entry does not say which link it is about", help);
            return None;
        };
        let known: Vec<_> = names.items().iter().filter_map(|name| self.overlay_node(name, nodes)).collect();
        if known.len() < names.items().len() {
            return None;
        }
        match <[_; 2]>::try_from(known) {
            Ok([one, other]) if one != other => Some([one, other]),
            _ => {
                self.error(link.span(), "a link is between two different nodes", help);
                None
            }
        }
    }
}

/// Returns the rate that a text such as "200Mbit/s" or "1.5 Gbit/s" names.
fn bits_per_second(text: &str) -> Option<u64> {
    let units = [("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)];
    let (number, factor) =
        units.into_iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let number = number.trim_end();
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let value = number.parse::<f64>().ok().filter(|_| is_plain)? * factor;
    (value <= 1e12).then_some(value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_and_its_unit() {
        let rates = [
            ("200Mbit/s", Some(200_000_000)),
            ("1.5 Gbit/s", Some(1_500_000_000)),
            ("64kbit/s", Some(64_000)),
            ("200", None),
            ("200 MB/s", None),
            ("-1Mbit/s", None),
            ("1e3Mbit/s", None),
            ("Mbit/s", None),
            ("9999999Gbit/s", None),
        ];
        for (text, rate) in rates {
            assert_eq!(bits_per_second(text), rate, "{text}");
        }
    }
}
